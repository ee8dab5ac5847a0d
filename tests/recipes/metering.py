"""The peaks of real steps: what torch's profiler sees, and what our own meter counts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from torchtune_adaptive.memory.meter import MemoryMeter

_TIMES = 3


def profiled(step: Callable[[], None]) -> int:
    """The most that one step has allocated at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = (e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]")
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


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
