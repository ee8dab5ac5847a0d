"""The peaks of real steps: what torch's profiler sees, and what our own meter counts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from torchtune_adaptive.memory.cpu_meter import MemoryMeter

_TIMES = 3
_SCORES_IN_CACHE = 512


def _flash_forward(query: Tensor, key: Tensor, *_: object, **__: object) -> int:
    rows, columns = _tile(query, key)
    return 4 * rows * (columns + 2 + query.shape[-1]) * torch.get_num_threads()


def _flash_backward(_: Tensor, query: Tensor, key: Tensor, *__: object, **___: object) -> int:
    rows, columns = _tile(query, key)
    return 4 * rows * 2 * columns * torch.get_num_threads()


def _tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    """The part of the scores that a thread of the CPU's attention works on."""
    tokens = query.shape[-2]
    rows = 256 if tokens >= 768 else 64 if tokens >= 192 else 32
    return min(rows, tokens), min(_SCORES_IN_CACHE, key.shape[-2])


CPU_WORKSPACES = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _flash_forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
}
"""What kernels take for themselves in fp32: the profiler sees it, a meter does not."""


class Profiled(NamedTuple):
    """What a step has allocated and not freed: while its result is there, and at most."""

    alive_bytes: int
    peak_bytes: int


def profiled(step: Callable[[], object]) -> Profiled:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = step()
    events = (e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]")
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    del result
    return Profiled(alive, peak)


def metered(step: Callable[[], None], resident: Iterable[Tensor], of: type[MemoryMeter] = MemoryMeter) -> int:
    """Collective: the most that this rank holds at once, without what gloo takes for itself.

    The least of several steps: a thread of gloo's lets go of a buffer sooner or later, and that only ever adds.
    """
    return min(_metered_once(step, resident, of) for _ in range(_TIMES))


def _metered_once(step: Callable[[], None], resident: Iterable[Tensor], of: type[MemoryMeter]) -> int:
    gc.collect()
    with of() as meter:
        meter.count(resident)
        step()
    return meter.peak_bytes
