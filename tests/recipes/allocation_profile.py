"""Measure memory peaks of real steps with torch's profiler, to compare with our own meter."""

from collections.abc import Callable
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile


class Profiled(NamedTuple):
    """Bytes that a step has allocated and not freed: with its result alive, and at the peak."""

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
