"""Memory that really runs out, on one rank or several, of which all share one card and talk through gloo."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import Gradients, gradients_of, same_gradients
from tests.gpu.real_steps import (
    Memory,
    RealStep,
    build,
    demo,
    limit,
    live_bytes,
    metered,
    samples_of,
    side_by_side,
    use,
)
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.oom import release
from torchtune_adaptive.engine.step import Recovery, SampleKind, StepRunner
from torchtune_adaptive.tune.samples import TEXT, Sample

ROWS = 8
SMALLER = (4, 2, 1)
TOKENS = {"cpu": 64, "cuda": 2048}
# few parameters, which gloo has to carry through the host, and large activations
SIZES = {
    "cpu": {"num_layers": 2, "embed_dim": 64, "intermediate_dim": 128},
    "cuda": {"num_layers": 4, "embed_dim": 256, "intermediate_dim": 1024, "vocab_size": 8192},
}
SHARES = (0.9, 0.6, 0.3, 0.1)
"""Of the way from what two rows need to what all rows need: where the limits are."""
CLOSE = 1e-4
LEFT_OVER_BYTES = {"cpu": 2**20, "cuda": 64 * 2**20}
"""What the failing rank may have less of: buffers of its last collectives, which the streams of gloo hold a while."""


class Repeated(NamedTuple):
    """A step under a limit, compared with one that had all memory."""

    failed_at: tuple[int, ...]
    """Collectives that this rank had issued when its memory ran out."""
    recoveries: int
    rows: int
    bitwise: bool
    largest_difference: float
    left_over_bytes: int
    """What the repeated step had less to start with on this rank."""


class Recoveries(NamedTuple):
    deterministic: bool
    """Whether undisturbed steps are bitwise equal here, in each of the splits."""
    steps: list[Repeated]


class Watched:
    """Collective: a runner of this step that notes where memory runs out, and what there is when a pass begins."""

    def __init__(self, step: RealStep, memory: Memory) -> None:
        self._step, self._memory = step, memory
        self.failed_at: list[int] = []
        self.live_bytes: list[int] = []
        self.runner = StepRunner(
            step.model,
            self._forward_backward,
            limit=RowLimit(ROWS),
            kind=SampleKind(length_of=TEXT.length_of, stand_in=TEXT.stand_in),
            recovery=Recovery(step.model, regrow_after=0),
        )

    def _forward_backward(self, samples: Sequence[Sample]):
        self.live_bytes.append(live_bytes(self._memory))
        try:
            return self._step.forward_backward(samples)
        except torch.OutOfMemoryError:
            self.failed_at.append(self.runner.recovery.ledger.position)
            raise

    def run(self, samples: Sequence[Sample]) -> int:
        self.failed_at, self.live_bytes = [], []
        return self.runner.run(samples, step=1).recoveries


def recover(name: str, failing: tuple[int, ...], first_pass: bool) -> Recoveries:
    """Collective: the same step under lower and lower limits on the failing ranks."""
    device = use(name)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it, cuBLAS may add up in another order each time
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore", message=".*deterministic")
    torch.utils.deterministic.fill_uninitialized_memory = False
    step = build(demo("full", name, "clip_grad_norm=null", **SIZES[name]), device)
    samples = samples_of(dist.get_rank(), ROWS, TOKENS[name])
    fails = dist.get_rank() in failing
    with metered(step) as memory:
        expected = {rows: undisturbed(step, samples, rows) for rows in SMALLER}
        deterministic = all(same_gradients(undisturbed(step, samples, rows), expected[rows]) for rows in SMALLER)
        need = {rows: need_bytes(step, memory, samples, rows) for rows in (2, ROWS)}
        steps = []
        for share in SHARES:
            watched = Watched(step, memory)
            step.model.zero_grad()
            if not first_pass:  # otherwise it does not know what a microbatch communicates
                watched.run(samples)
                step.model.zero_grad()
            release()
            if fails:
                limit(memory, live_bytes(memory) + share * need[ROWS] + (1 - share) * need[2])
            recoveries = watched.run(samples)
            limit(memory, float("inf"))
            steps.append(compared(watched, recoveries, gradients_on_host(step), expected))
            watched.runner.close()
    return Recoveries(deterministic, steps)


def undisturbed(step: RealStep, samples: Sequence[Sample], rows: int) -> Gradients:
    """Collective: plain FSDP2, or plain PyTorch, in microbatches of so many rows."""
    step.model.zero_grad()
    for start in range(0, len(samples), rows):
        step.forward_backward(samples[start : start + rows])
    return gradients_on_host(step)


def need_bytes(step: RealStep, memory: Memory, samples: Sequence[Sample], rows: int) -> int:
    """Collective: above what there is between two steps, and beside gradients of an earlier microbatch."""
    undisturbed(step, samples[:rows], rows)
    step.model.zero_grad()
    release()
    before = live_bytes(memory)
    memory.reset_peak()
    undisturbed(step, samples[: 2 * rows], rows)
    return memory.peak_bytes - before


def gradients_on_host(step: RealStep) -> Gradients:
    step.synchronize()
    return {name: _on_host(gradient) for name, gradient in gradients_of(step.model).items()}


def _on_host(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.cpu()


def compared(watched: Watched, recoveries: int, found: Gradients, expected: dict[int, Gradients]) -> Repeated:
    rows = watched.runner.limit.rows
    return Repeated(
        failed_at=tuple(watched.failed_at),
        recoveries=recoveries,
        rows=rows,
        bitwise=same_gradients(found, expected[rows]),
        largest_difference=largest_difference(found, expected[rows]),
        left_over_bytes=watched.live_bytes[-ROWS // rows] - watched.live_bytes[0],
    )


def largest_difference(found: Gradients, expected: Gradients) -> float:
    """Of any gradient, as a share of the largest number in it."""
    assert found.keys() == expected.keys()
    shares = []
    for name, gradient in expected.items():
        assert gradient is not None
        shares.append(float((found[name] - gradient).abs().max() / gradient.abs().max()))
    return max(shares)


class Case(NamedTuple):
    ranks: int
    failing: tuple[int, ...]
    first_pass: bool = False

    def __str__(self) -> str:
        return f"ranks {self.failing} of {self.ranks}{', first pass' if self.first_pass else ''}"


CASES = (Case(1, (0,)), Case(2, (1,)), Case(2, (1,), first_pass=True), Case(2, (0, 1)), Case(3, (0,)))
ON_A_CPU = CASES[:2]  # where tests/distributed/ has shown more
Recovered: TypeAlias = Mapping[Case, Future[list[Recoveries]]]


@pytest.fixture(scope="module")
def recovered(device: str) -> Iterator[Recovered]:
    def on_ranks(case: Case) -> list[Recoveries]:
        return run_on_ranks(case.ranks, recover, device, case.failing, case.first_pass, timeout_s=150)

    with side_by_side(device, on_ranks, ON_A_CPU if device == "cpu" else CASES) as found:
        yield found


@pytest.fixture
def ranks(recovered: Recovered, case: Case) -> list[Recoveries]:
    """What each rank of the case saw."""
    if case not in recovered:
        pytest.skip("two cases show on a CPU that this test works")
    return recovered[case].result()


@pytest.mark.real_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_after_running_out_of_memory_is_that_of_an_undisturbed_step(
    ranks: list[Recoveries], case: Case
) -> None:
    for deterministic, steps in ranks:
        for step in steps:
            assert step.recoveries >= 1
            assert step.rows <= ROWS // 2
            assert step.bitwise or (not deterministic and step.largest_difference < CLOSE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_runs_out_on_the_limited_ranks_only_and_at_several_places(ranks: list[Recoveries], case: Case) -> None:
    for rank, (_, steps) in enumerate(ranks):
        failed = [step.failed_at[0] for step in steps if step.failed_at]
        assert len(failed) == (len(SHARES) if rank in case.failing else 0)
        if failed and case.ranks > 1:
            assert len(set(failed)) > 1


@pytest.mark.parametrize("case", [case for case in CASES if not case.first_pass], ids=str)
def test_a_repeated_step_starts_with_the_memory_that_the_failed_one_had(
    device: str, ranks: list[Recoveries], case: Case
) -> None:
    for rank in case.failing:
        steps = ranks[rank].steps
        assert max(step.left_over_bytes for step in steps) <= LEFT_OVER_BYTES[device]
