"""The peaks of real steps: what torch's profiler sees, and what our own meter counts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from torchtune_adaptive.engine.meter import MemoryMeter

_TIMES = 3


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


def metered(step: Callable[[], None], resident: Iterable[Tensor]) -> int:
    """Collective: the most that this rank holds at once, without what gloo takes for itself.

    The least of several steps: a thread of gloo's lets go of a buffer sooner or later, and that only ever adds.
    """
    return min(_metered_once(step, resident) for _ in range(_TIMES))


def _metered_once(step: Callable[[], None], resident: Iterable[Tensor]) -> int:
    gc.collect()
    with MemoryMeter() as meter:
        meter.count(resident)
        step()
    return meter.peak_bytes
