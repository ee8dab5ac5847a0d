"""Rehearse again with random values: does memory depend on numbers that a kernel would have computed?"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import takewhile
from typing import Any

from gpu_rehearsal.gpus import Gpu
from gpu_rehearsal.processes.representatives import representatives
from gpu_rehearsal.processes.start import rehearse_once
from gpu_rehearsal.report.record import END, END_OF_STEP, FIRST, NOT_FINITE, USUAL
from gpu_rehearsal.report.result import RehearsalResult
from gpu_rehearsal.settings import MOST_RANKS, RankSettings

MOST_RANDOM = 8
"""Rehearsals with random values."""


def rehearse_with_values(
    settings: RankSettings, command: Sequence[str], gpu: Gpu, ranks: int | None, *, quiet: bool, once: bool
) -> RehearsalResult:
    """Rehearse a command and, if it fits and has read values that a kernel would have computed, also with random ones.

    If memory differs, find the places that decide this, until random values at all others make no difference.
    """
    if settings.together is not None and not settings.together and ranks and ranks > MOST_RANKS:
        alone = _rehearse(settings._replace(ranks=ranks, together=None, rank=0, steps=1), command, gpu, quiet=True)
        chosen = representatives(alone.groups, ranks, [each["rank"] for each in alone.rank_peaks])
        settings = settings._replace(together=chosen, rank=chosen[-1])
    settings = settings._replace(ranks=ranks)
    found = _rehearse(settings._replace(follows=True), command, gpu, quiet=quiet)
    if _raised_after_read(found):
        if not quiet:
            print("rehearse: perhaps a function needs a float of Python: once more, with such", file=sys.stderr)
        found = _rehearse(settings, command, gpu, quiet=quiet)
        if _raised_after_read(found) and not once:
            if not quiet:
                print("rehearse: perhaps a guessed value is too small: once more, with the largest", file=sys.stderr)
            largest = _rehearse(settings._replace(largest=found.places_read), command, gpu, quiet=quiet)
            return _instead(found, largest) if largest.fits else found
    checks = found.end.get("checks_for_nan")
    if not found.fits or not (found.decisions or checks):
        return found
    if once:
        return replace(found, untried=found.decisions)
    if not quiet:
        print("rehearse: the script reads computed values: once more, with random ones", file=sys.stderr)
    spent, ends, interrupted = [found.cpu_s], list[str](), False

    def differing(kept: Sequence[str] | None, **options: Any) -> RehearsalResult | None:
        """Rehearse with random values, except at these places, or with NaN. Return the result if its memory differs."""
        nonlocal interrupted
        if interrupted:
            return None
        changed = settings._replace(ranks=found.ranks, kept=kept, **options)
        try:
            other = _rehearse(changed, command, gpu, quiet=True)
        except KeyboardInterrupt:
            if quiet:
                raise
            interrupted = True
            return None
        spent.append(other.cpu_s)
        if other.fits and len(other.steps) > len(found.steps):
            ends.append(found.last_read)
        return other if _compare(other, found) else None

    others: dict[str, RehearsalResult] = {}
    while found.decisions and len(spent) <= MOST_RANDOM and (other := differing([*others])):
        suspects = [each for each in _reads_before_difference(found, other) if each not in others]
        while _compare(other, found) > 0 and len(suspects) > 1 and len(spent) <= MOST_RANDOM:
            recent, earlier = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
            again = differing([*others, *recent])
            suspects = earlier if again and _compare(again, found) > 0 else recent
        if not suspects:
            found = replace(found, is_repeatable=False)
            break
        others[suspects[0]] = other
    other = differing(None, not_finite=True) if checks else None
    if other and (other.out_of_memory or (other.fits and _has_higher_peak(other, found, "reserved_bytes"))):
        place = next(iter(_reads_before_difference(found, other)), "an unknown line")
        others[place if place in others else NOT_FINITE + place] = other
    if interrupted:
        return replace(found, interrupted=True, untried=found.decisions)
    apart = _hang_of_one(found, differing) if len(found.rank_peaks) > 1 else {}
    found = _merged(found, others)
    return replace(found, cpu_s=sum(spent), ended_by=next(iter(ends), ""), hang_of_one=apart)


def _raised_after_read(found: RehearsalResult) -> bool:
    """Return True if there is no answer, because the script has raised an error after it has read unknown values."""
    raised = "raised" in str(found.hang) if found.hang else found.status > 0
    return found.fits is None and bool(found.places_read) and raised and not found.interrupted


def _instead(failed: RehearsalResult, largest: RehearsalResult) -> RehearsalResult:
    """Return a rehearsal with the largest values, and name the last line that has read one before the error without."""
    place = next((each for each in reversed(failed.places_read) if each in failed.decisions), failed.last_read)
    tried = {"verdict": failed.verdict().partition("; ")[0], "higher": False, "failed": True, "reserved_bytes": None}
    untried = [each for each in largest.decisions if each != place]
    return replace(largest, tried=[{"place": FIRST + place, **tried}], untried=untried)


def _hang_of_one(found: RehearsalResult, differing: Callable[..., RehearsalResult | None]) -> dict[str, Any]:
    """Return the hang if the last rank alone reads random values, unless these make it fail; {} if there is none."""
    other = differing(None, apart=found.rank_peaks[-1]["rank"])
    failed = other is None or any(each["does"].startswith("raised") for each in other.hang.get("others", ()))
    return {} if failed or other is None else other.hang


def _rehearse(settings: RankSettings, command: Sequence[str], gpu: Gpu, *, quiet: bool) -> RehearsalResult:
    """Rehearse a command once. If quiet, keep its output for the result."""
    with tempfile.TemporaryFile() if quiet else nullcontext() as output:
        found = rehearse_once(command, gpu, settings, output)
        if output and found.fits is None:
            output.seek(0)
            found = replace(found, output=output.read().decode(errors="replace"))
    if quiet and found.interrupted:
        raise KeyboardInterrupt
    return found


def _per_step(found: RehearsalResult) -> list[tuple[int, int]]:
    """Return for each step and the end: the bytes allocated so far in total, and the peak."""
    totals = (each["total_bytes"] for each in found.reads if each["at"] in (END_OF_STEP, END))
    return [*zip(totals, (each["allocated_bytes"] for each in found.all_peaks), strict=False)]


def _compare(found: RehearsalResult, usual: RehearsalResult) -> int:
    """Return 1 if this rehearsal with random values failed or needed more memory, -1 if it needed less."""
    if not found.fits or _has_higher_peak(found, usual):
        return 1
    mine, theirs = _per_step(found), _per_step(usual)
    if len(mine) != len(theirs):  # one has ended earlier: its end is not the end of a step
        mine, theirs = mine[:-1], theirs[:-1]
    differences = ((mine > theirs) - (mine < theirs) for mine, theirs in zip(mine, theirs, strict=False))
    return next(filter(None, differences), 0)


def _has_higher_peak(found: RehearsalResult, other: RehearsalResult, of: str = "allocated_bytes") -> bool:
    """Return True if this rehearsal had a higher peak of this memory."""
    return found.run_peaks[of] > other.run_peaks[of]


def _reads_before_difference(found: RehearsalResult, other: RehearsalResult) -> list[str]:
    """Return the places that have read values before another rehearsal differed from this one: those that
    may decide something first, in each case the last first."""
    pairs = zip(found.reads, other.reads, strict=False)
    same = [mine["at"] for mine, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    places = [at for at in dict.fromkeys(reversed(same)) if at not in (END_OF_STEP, END)]
    return sorted(places, key=lambda at: at not in found.decisions)


def _merged(found: RehearsalResult, others: Mapping[str, RehearsalResult]) -> RehearsalResult:
    """Return the result with the highest peak: `found`, or one with random values.

    If one of them has run out of memory, there is no answer. `others` has the place that has decided each of them.
    """
    worst = max((found, *others.values()), key=lambda each: each.run_peaks["reserved_bytes"] if each.fits else 0)
    runs = {**others, USUAL: found} if worst is not found else others
    return replace(
        worst,
        too_large=next((place for place, each in others.items() if each.out_of_memory), ""),
        is_repeatable=found.is_repeatable,
        tried=[
            {
                "place": place,
                "verdict": each.verdict().partition("; ")[0],
                "higher": each.fits is not None
                and any(mine[1] > theirs[1] for mine, theirs in zip(_per_step(each), _per_step(found), strict=False)),
                "failed": each.fits is None,
                "reserved_bytes": each.run_peaks["reserved_bytes"] if each.fits else None,
            }
            for place, each in runs.items()
        ],
    )
