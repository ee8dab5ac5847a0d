"""The report of a rehearsal, as text and as JSON."""

from __future__ import annotations

from typing import Any

from gpu_rehearsal.formatting import count_of, ranks_named
from gpu_rehearsal.hangs import explain
from gpu_rehearsal.report.record import GIB, Record
from gpu_rehearsal.report.step_time import time_lines
from gpu_rehearsal.report.verdict import Outcome, fits, gib, outcome, shortened, size_of, values_at, verdict

SHOWN_STEPS = 20
_ROUTING = (
    "tokens were spread evenly over the experts that are counted at {places}: a rank whose experts get more tokens "
    "needs more memory (try --skew 2)"
)


def as_text(found: Record) -> str:
    """Return the verdict, the searches, the steps, and what holds the memory after an out-of-memory error."""
    searches = [[search["text"]] for search in found.searches]
    time = found.recorded_time()
    peaks = [_peak_lines("device", found.devices), _peak_lines("rank", found.rank_peaks)]
    if outcome(found) is Outcome.HANGS:
        return "\n".join([verdict(found), "", *explain.as_lines(found.hang), *_assumed(found)])
    largest = [f"largest that fits: {found.largest}" if found.largest else "none fits; the smallest:"]
    searched = [largest] * bool(found.largest or (found.largest == 0 and found.out_of_memory))
    sections = [
        *searched,
        [verdict(found)],
        *searches,
        _step_lines(found),
        time_lines(time, found.work, found.gpu.name, found.ranks) if time and found.work and found.gpu else [],
        *peaks,
        _error_lines(found),
    ]
    if fits(found) or found.steps or found.errors or found.guesses:
        sections.append(_condition_lines(found))
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _step_lines(found: Record) -> list[str]:
    shown, left_out = found.steps[:SHOWN_STEPS], len(found.steps[SHOWN_STEPS:])
    return [
        *[f"{'step':>6}  {'allocated':>9}  {'reserved':>9}  flushes   (peaks, GiB)"] * bool(shown),
        *(
            f"{each['step']:>6}  {gib(each['allocated_bytes']):>9}  {gib(each['reserved_bytes']):>9}  "
            f"{each['flushes'] or '':>7}".rstrip()
            for each in shown
        ),
        *[f"  {left_out} more steps are not shown"] * bool(left_out),
    ]


def _error_lines(found: Record) -> list[str]:
    if (error := found.unresolved_oom) is None or fits(found):
        return []
    cached = error["reserved_bytes"] - error["allocated_bytes"]
    return [
        f"at {error['file']}:{error['line']}: {error['source']}",
        *[f"in {error['operation']}"] * (error["operation"] != error["source"]),
        f"requested {size_of(error['asked_bytes'])}; "
        f"free {size_of(error['free_bytes'])} on the GPU, {size_of(cached)} in the allocator's cache",
        *(f"{gib(held):>9} GiB  {holder}" for holder, held in error["held_bytes"].items() if held > GIB // 200),
    ]


def _condition_lines(found: Record) -> list[str]:
    places = found.places_read if found.out_of_memory else []
    return [
        f"rank {found.rank} of {found.ranks}; of {size_of(found.usable_bytes + found.overhead_bytes)} of GPU "
        f"memory, {size_of(found.overhead_bytes)} are for the CUDA context, NCCL and libraries (--memory-overhead)",
        *[found.setting] * bool(found.setting),
        "kernels did not run: every loss is 0, and branches on values may differ in training",
        *[_ROUTING.format(places=shortened(found.routing))] * bool(found.routing),
        *["another rehearsal with the same values differs: does the script find files that it has written?"]
        * (not found.is_repeatable),
        *(f"with {values_at(each['place'])}: {each['verdict']}" for each in found.tried),
        *[f"guessed values were read at {shortened(places)}: with others, it may fit"] * bool(places),
        *(["if only one rank reads other values:", *explain.as_lines(found.hang_of_one)] if found.hang_of_one else []),
        *["to state a value: --fixed FILE:LINE=N"] * bool(found.tried or places),
        *(f"--fixed {place}=N has no effect: this line reads no unknown value" for place in found.unread),
        *["later steps may need more memory: --steps 0 runs to the end"] * bool(found.end.get("stopped")),
        *found.end.get("notes", ()),
        *[f"{found.collectives or 0:,} collectives compared: all ranks agree"] * bool(found.collectives),
        *_assumed(found),
    ]


def _assumed(found: Record) -> list[str]:
    """Return what is assumed about ranks that did not run, if several ran."""
    ran = [each["rank"] for each in found.rank_peaks]
    if not 1 < len(ran) < found.ranks:
        return []
    kinds = count_of(found.kinds, "sequence") + " of calls"
    who = f"{len(ran)} of {found.ranks:,} ranks ran ({ranks_named(ran)})"
    wrong = "the others are assumed to send the values of the rank before them: if they do not, the hang may be wrong"
    return [f"{who} and made {kinds}: the others are assumed to make the same", *[wrong] * bool(found.hang)]


def as_dict(found: Record) -> dict[str, Any]:
    """Return the result for JSON."""
    same = (
        "rank", "ranks", "usable_bytes", "overhead_bytes", "rank_peaks", "out_of_memory", "caught",
        "guesses", "routing", "tried", "untried", "ended_by", "later_batch",
    )  # fmt: skip
    return {
        "fits": fits(found),
        "verdict": verdict(found),
        **{name: getattr(found, name) for name in same},
        "places_read": found.places_read,
        "peak_by_kind": found.peak_by_kind,
        "largest": found.largest,
        "searches": found.searches,
        "steps": found.steps,
        "time": _time_as_dict(found),
        "hang_of_one": found.hang_of_one or None,
        "hang": found.hang if outcome(found) is Outcome.HANGS else None,
        "collectives": found.collectives,
        "after_last_step": found.end,
        "script_status": found.status,
        "cpu_s": found.cpu_s,
    }


def _time_as_dict(found: Record) -> dict[str, Any] | None:
    time, work = found.recorded_time(), found.work
    if time is None or work is None or found.gpu is None:
        return None
    return {"gpu": found.gpu.name, "step": found.traced["step"], **time.as_dict(), **work.totals(found.ranks)}


def _peak_lines(name: str, peaks: list[dict[str, Any]]) -> list[str]:
    """Return a table of the peaks of several devices or ranks."""
    if len(peaks) < 2:
        return []
    rows = (f"{each[name]:>6}  {gib(each['allocated_bytes']):>9}  {gib(each['reserved_bytes']):>9}" for each in peaks)
    return [f"{name:>6}  {'allocated':>9}  {'reserved':>9}   (peaks of the run, GiB)", *rows]
