"""The search on a model with a billion parameters: compared with brute force, its side effects, and the speed of its
result.
"""

import statistics
from time import perf_counter
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from tests.gpu.real_steps import (
    GIB,
    ON_NULL,
    RealStep,
    build,
    demo,
    limit,
    samples_of,
    use,
)
from tests.ranks import run_on_ranks
from torchtune_adaptive.config.command_line import locate
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.memory import CudaMemory
from torchtune_adaptive.engine.oom import clear_frames, is_oom, release_memory
from torchtune_adaptive.engine.probes import find_max_batch_size
from torchtune_adaptive.engine.search import SearchResult
from torchtune_adaptive.engine.tensors import plain_tensors

TOKENS = 1024
ROOM_BYTES = 16 * GIB
"""On top of resident memory, so that a large card can represent a small one."""
SIZES = {"embed_dim": 256, "intermediate_dim": 1024, "vocab_size": 8192}
ROOM_TOGETHER_BYTES = 8 * GIB
REPEATS = 3
WORTH = 0.98


class Measured(NamedTuple):
    """A separate step with this many rows."""

    peak_bytes: int | None
    """`None` after an out-of-memory error."""
    retries: int

    def accepted(self, budget_bytes: int) -> bool:
        return self.peak_bytes is not None and self.peak_bytes <= budget_bytes and self.retries == 0


class Judged(NamedTuple):
    linear: SearchResult
    binary: SearchResult
    left_no_trace: bool | None
    """None on a null device, which computes no results."""
    around: dict[int, Measured]
    """By rows, from the search result up to the first rejected size."""
    tokens_per_second: dict[int, float]
    """By rows, for powers of two that trained without an out-of-memory error. None on a null device."""
    retries: dict[int, int]
    """Retries of the allocator during that measurement."""
    seconds: dict[str, float]
    """Duration of each search."""

    @property
    def best(self) -> int:
        """The result of brute force."""
        return max(rows for rows, each in self.around.items() if each.accepted(self.linear.budget_bytes))


def config() -> DictConfig:
    cfg = OmegaConf.load(locate("adaptive/llama3_2/1B_full"))
    return OmegaConf.merge(cfg, {"enable_activation_checkpointing": True, "clip_grad_norm": 1.0})


def search_and_judge(name: str) -> Judged:
    """Collective: run all measurements of one model, which takes a while to build."""
    step, memory = build(config(), use(name)), CudaMemory()
    step.train(1, TOKENS)  # allocate permanent memory, including optimizer state
    release_memory()
    before = None if ON_NULL else state_of(step)
    limit(torch.cuda.memory_allocated() + ROOM_BYTES)
    search_step = step.to_search(TOKENS)
    found, seconds = {}, {}
    for strategy in ("linear", "binary"):
        began = perf_counter()
        found[strategy] = find_max_batch_size(search_step, memory=memory, round_to="none", strategy=strategy)
        seconds[strategy] = perf_counter() - began
    linear = found["linear"]
    left_no_trace = None if before is None else same_state(before, state_of(step))
    around = brute_force(step, memory, linear)
    speeds, retries = ({}, {}) if ON_NULL else speeds_around(step, memory, linear.rows)
    search_step.runner.close()
    return Judged(linear, found["binary"], left_no_trace, around, speeds, retries, seconds)


def brute_force(step: RealStep, memory: CudaMemory, found: SearchResult) -> dict[int, Measured]:
    """Collective: run plain steps of increasing size, starting a little below the search result."""
    measured: dict[int, Measured] = {}
    rows = max(1, found.rows - 1)
    while rows <= found.rows or measured[rows - 1].accepted(found.budget_bytes):
        measured[rows] = measure(step, memory, rows)
        rows += 1
    return measured


def measure(step: RealStep, memory: CudaMemory, rows: int) -> Measured:
    """Collective: measure this step after any earlier one."""
    release_memory()
    memory.reset_peak()
    retries = memory.retries
    fits = trains(step, rows)
    if not fits:
        step.model.zero_grad()
        release_memory()
    return Measured(memory.peak_bytes if fits else None, memory.retries - retries)


def trains(step: RealStep, rows: int) -> bool:
    try:
        step.train(rows, TOKENS)
        return True
    except Exception as error:
        if not is_oom(error):
            raise
        clear_frames(error)
    return False


def speeds_around(step: RealStep, memory: CudaMemory, rows: int) -> tuple[dict[int, float], dict[int, int]]:
    """Collective: run one step's samples in microbatches of each power of two, until they do not fit."""
    chosen = 1 << (rows.bit_length() - 1)
    samples = samples_of(0, 4 * chosen, TOKENS)
    speeds, retries = {}, {}
    for size in sorted({max(1, chosen // 4), max(1, chosen // 2), chosen, 2 * chosen}):
        release_memory()
        runner, times, retries_before = step.runner(size), [], memory.retries
        for number in range(REPEATS + 1):  # the first warms up
            torch.cuda.synchronize()
            began = perf_counter()
            step.optimization.update(runner.run(samples, step=number).target_tokens)
            torch.cuda.synchronize()
            times.append(perf_counter() - began)
        if runner.limit == RowLimit(size):
            speeds[size] = len(samples) * TOKENS / statistics.median(times[1:])
            retries[size] = memory.retries - retries_before
        runner.close()
    return speeds, retries


def state_of(step: RealStep) -> list[torch.Tensor]:
    """Return everything that training depends on, on the host."""
    states = [value for each in step.optimization.optimizers[0].state.values() for value in each.values()]
    tensors = [*step.model.parameters(), *step.model.buffers(), *states]
    plain = [each.detach().to("cpu", copy=True) for tensor in tensors for each in plain_tensors(tensor)]
    return [*plain, torch.get_rng_state(), torch.cuda.get_rng_state()]


def same_state(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def search_together(name: str) -> SearchResult:
    """Collective: search under FSDP2 with less memory on the last rank."""
    step, memory = build(demo("full", name, **SIZES), use(name)), CudaMemory()
    step.train(1, TOKENS)
    release_memory()
    last = dist.get_rank() == dist.get_world_size() - 1
    limit(torch.cuda.memory_allocated() + (0.5 if last else 1) * ROOM_TOGETHER_BYTES)
    return find_max_batch_size(step.to_search(TOKENS), memory=memory, strategy="binary", round_to="none")


def test_ranks_on_one_card_search_together_without_hanging(cuda: str) -> None:
    first, second = run_on_ranks(2, search_together, cuda, timeout_s=120)
    assert first == second
    assert first.rows > 1
    assert first.out_of_memory_count > 0


@pytest.fixture(scope="module")
def judged(cuda: str) -> Judged:
    return run_on_ranks(1, search_and_judge, cuda, timeout_s=240)[0]


def test_linear_finds_95_to_100_percent_of_brute_force(judged: Judged) -> None:
    assert 0.95 * judged.best <= judged.linear.rows <= judged.best
    assert judged.linear.out_of_memory_count == 0
    assert len(judged.linear.probes) <= 5  # 4, except if one row costs more than the second


def test_binary_runs_out_of_memory_and_finds_the_brute_force_size(judged: Judged) -> None:
    assert judged.binary.out_of_memory_count > 0
    assert judged.binary.rows == judged.best


def test_result_was_measured_without_a_flush_of_the_cache(judged: Judged) -> None:
    for result in (judged.linear, judged.binary):
        (answer,) = (probe for probe in result.probes if probe.rows == result.rows)
        assert answer.peak.retries == 0
        assert answer.peak.peak_bytes <= result.budget_bytes


@pytest.mark.real_gpu
def test_search_has_no_side_effects(judged: Judged) -> None:
    assert judged.left_no_trace


@pytest.mark.real_gpu
def test_found_size_is_as_fast_as_any_nearby_power_of_two(judged: Judged) -> None:
    chosen = 1 << (judged.linear.rows.bit_length() - 1)
    assert judged.tokens_per_second[chosen] >= WORTH * max(judged.tokens_per_second.values())
    assert judged.retries[chosen] == 0
