"""Real out-of-memory errors on one or several ranks that share one card and communicate over gloo."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import gradients_equal, gradients_of
from tests.fault_injection import wrapping_passes
from tests.gpu.real_steps import (
    ON_NULL,
    RealStep,
    build,
    demo,
    limit,
    samples_of,
    side_by_side,
    use,
)
from tests.ranks import run_on_ranks
from tests.unit.data.models import furthest
from torchtune_adaptive.data.samples import Sample
from torchtune_adaptive.engine.oom import release_memory
from torchtune_adaptive.engine.step import PassKind

OnHost: TypeAlias = dict[str, torch.Tensor]
"""Gradients by parameter."""

ROWS = 8
SMALLER = (4, 2, 1)
TOKENS = 2048
SIZES = {"num_layers": 4, "embed_dim": 256, "intermediate_dim": 1024, "vocab_size": 8192}
"""Few parameters, because gloo copies them through the host, and large activations."""
SHARES = (0.9, 0.6, 0.3, 0.1)
"""Positions of the limits between the needs of two rows (0) and of all rows (1)."""
CLOSE = 1e-4
LEFT_OVER_BYTES = 64 * 2**20
"""Memory that the failing rank may lack: buffers of its last collectives, which gloo's streams hold for a while."""


class Repeated(NamedTuple):
    """A step under a limit, compared with an unlimited step."""

    failed_at: tuple[int, ...]
    """Collectives that this rank had issued when it ran out of memory."""
    recoveries: int
    rows: int
    bitwise: bool
    largest_difference: float
    left_over_bytes: int
    """Bytes by which the repeated step started with less memory on this rank."""


class Recoveries(NamedTuple):
    deterministic: bool
    """True if undisturbed steps are bitwise equal here, in each split."""
    steps: list[Repeated]


class Watched:
    """Collective: a runner of this step that records where memory runs out and the memory before each microbatch."""

    def __init__(self, step: RealStep) -> None:
        self.failed_at: list[int] = []
        self.live_bytes: list[int] = []
        self.runner = step.runner(ROWS)

    @contextmanager
    def _noting(self, inside: PassKind) -> Iterator[None]:
        if inside == "microbatch":
            self.live_bytes.append(torch.cuda.memory_allocated())
        try:
            yield
        except torch.OutOfMemoryError:
            self.failed_at.append(self.runner.recovery.ledger.position)
            raise

    def run(self, samples: Sequence[Sample]) -> int:
        self.failed_at, self.live_bytes = [], []
        with wrapping_passes(self.runner, self._noting):
            return self.runner.run(samples, step=1).recoveries


def recover(name: str, failing: tuple[int, ...], first_pass: bool) -> Recoveries:
    """Collective: repeat a step under decreasing limits on the failing ranks."""
    device = use(name)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it, the order of cuBLAS's sums may vary
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore", message=".*deterministic")
    torch.utils.deterministic.fill_uninitialized_memory = False
    step = build(demo("full", name, "clip_grad_norm=null", **SIZES), device)
    samples = samples_of(dist.get_rank(), ROWS, TOKENS)
    fails = dist.get_rank() in failing
    expected = {rows: undisturbed(step, samples, rows) for rows in SMALLER}
    deterministic = all(gradients_equal(undisturbed(step, samples, rows), expected[rows]) for rows in SMALLER)
    need = {rows: need_bytes(step, samples, rows) for rows in (2, ROWS)}
    steps = []
    for share in SHARES:
        watched = Watched(step)
        step.model.zero_grad()
        if not first_pass:  # otherwise it has no record of a microbatch's collectives
            watched.run(samples)
            step.model.zero_grad()
        release_memory()
        if fails:
            limit(torch.cuda.memory_allocated() + share * need[ROWS] + (1 - share) * need[2])
        recoveries = watched.run(samples)
        limit(float("inf"))
        steps.append(compared(watched, recoveries, gradients_on_host(step), expected))
        watched.runner.close()
    return Recoveries(deterministic, steps)


def undisturbed(step: RealStep, samples: Sequence[Sample], rows: int) -> OnHost:
    """Collective: run plain FSDP2 or plain PyTorch in microbatches of `rows` rows."""
    step.model.zero_grad()
    for start in range(0, len(samples), rows):
        step.forward_backward(samples[start : start + rows])
    return gradients_on_host(step)


def need_bytes(step: RealStep, samples: Sequence[Sample], rows: int) -> int:
    """Collective: return the memory needed on top of the state between steps and an earlier microbatch's gradients."""
    undisturbed(step, samples[:rows], rows)
    step.model.zero_grad()
    release_memory()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    undisturbed(step, samples[: 2 * rows], rows)
    return torch.cuda.max_memory_allocated() - before


def gradients_on_host(step: RealStep) -> OnHost:
    torch.cuda.synchronize()
    return {name: gradient.cpu() for name, gradient in gradients_of(step.model).items() if gradient is not None}


def compared(watched: Watched, recoveries: int, found: OnHost, expected: dict[int, OnHost]) -> Repeated:
    rows = watched.runner.limit.rows
    return Repeated(
        failed_at=tuple(watched.failed_at),
        recoveries=recoveries,
        rows=rows,
        bitwise=gradients_equal(found, expected[rows]),
        largest_difference=furthest(found, expected[rows]),
        left_over_bytes=watched.live_bytes[-ROWS // rows] - watched.live_bytes[0],
    )


class Case(NamedTuple):
    ranks: int
    failing: tuple[int, ...]
    first_pass: bool = False

    def __str__(self) -> str:
        return f"ranks {self.failing} of {self.ranks}{', first pass' if self.first_pass else ''}"


MORE = () if ON_NULL else (Case(2, (1,), first_pass=True), Case(2, (0, 1)), Case(3, (0,)))
"""On a null device, tests/null/test_recovery.py tests more."""
CASES = (Case(1, (0,)), Case(2, (1,)), *MORE)
Recovered: TypeAlias = Mapping[Case, Future[list[Recoveries]]]


@pytest.fixture(scope="module")
def recovered(cuda: str) -> Iterator[Recovered]:
    def on_ranks(case: Case) -> list[Recoveries]:
        return run_on_ranks(case.ranks, recover, cuda, case.failing, case.first_pass, timeout_s=150)

    with side_by_side(on_ranks, CASES) as found:
        yield found


@pytest.fixture
def ranks(recovered: Recovered, case: Case) -> list[Recoveries]:
    """Results of each rank of the case."""
    return recovered[case].result()


@pytest.mark.real_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_after_oom_is_that_of_an_undisturbed_step(ranks: list[Recoveries], case: Case) -> None:
    for deterministic, steps in ranks:
        for step in steps:
            assert step.recoveries >= 1
            assert step.rows <= ROWS // 2
            assert step.bitwise or (not deterministic and step.largest_difference < CLOSE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_limited_ranks_run_out_of_memory_and_at_several_places(ranks: list[Recoveries], case: Case) -> None:
    for rank, (_, steps) in enumerate(ranks):
        failed = [step.failed_at[0] for step in steps if step.failed_at]
        assert len(failed) == (len(SHARES) if rank in case.failing else 0)
        if failed and case.ranks > 1:
            assert len(set(failed)) > 1


@pytest.mark.parametrize("case", [case for case in CASES if not case.first_pass], ids=str)
def test_repeated_step_starts_with_the_memory_of_the_failed_one(ranks: list[Recoveries], case: Case) -> None:
    for rank in case.failing:
        steps = ranks[rank].steps
        assert max(step.left_over_bytes for step in steps) <= LEFT_OVER_BYTES
