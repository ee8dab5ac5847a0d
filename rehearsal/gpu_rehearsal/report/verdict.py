"""The verdict of a rehearsal: how it has ended, and this in one line."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from enum import Enum, auto

from gpu_rehearsal.formatting import count_of, ranks_named
from gpu_rehearsal.hangs import explain
from gpu_rehearsal.report.record import END, FIRST, GIB, NOT_FINITE, USUAL, Record, place_in

SHOWN_PLACES = 3
ENDLESS = 16
"""A place that was read this many times without another seems to be the condition of an endless loop."""
ENOUGH_STEPS = 100
"""An optimizer that has taken none of this many steps is not used."""
MUCH_LESS = 0.8
"""The verdict also names values with which the peak is less than this share."""
_HINTS = {
    r"ZeroDivisionError|FloatingPointError|ValueError: (math domain error|expected a positive input|Total of weights)"
    r"|probabilities do not sum": "a rehearsal reads numbers of the GPU as 0",
    r"KeyError: '(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)'": "torchrun sets it: put torchrun before the script",
    r"invalid device ordinal|You requested gpu|[Ii]nvalid device (id|index)|device_id cuda:": "for several processes, "
    "pass --ranks; for several GPUs in one process, --devices",
    r"\bnvcc\b|CUDA_HOME": "it compiles kernels while it runs: install CUDA's compiler, or switch these kernels off, "
    "for example in vLLM with VLLM_USE_FLASHINFER_SAMPLER=0",
}
"""Explanations of a script's errors in a rehearsal, by pattern."""
GROWING = "; batches grow each time that the data starts again ({first:,} to {last:,} elements): try --steps 0"
LARGER = "; batch {batch} has {elements:,} elements, earlier ones at most {rehearsed:,} (--steps {steps} rehearses it)"


class Outcome(Enum):
    """How a rehearsal has ended."""

    FITS = auto()
    OUT_OF_MEMORY = auto()
    INTERRUPTED = auto()
    TIMED_OUT = auto()
    HANGS = auto()
    """Ranks that run together wait for each other."""
    USED_ELSEWHERE = auto()
    """A process that the script has started uses a GPU."""
    KILLED = auto()
    FAILED = auto()
    UNREPORTED_OOM = auto()
    """The script ended with success, but completed no step after an out-of-memory error."""
    SECOND_STEP_TOO_LARGE = auto()
    IDLE_OPTIMIZER = auto()
    """The rehearsal was stopped before an optimizer took its first step."""
    IDLE_RANK = auto()
    """A rank took no step, perhaps because of a value that a rank that did not run has sent."""
    DEPENDS = auto()
    """The script fits, but not with other values of the GPU."""
    UNUSED = auto()
    """The script allocated no memory of a GPU."""


def outcome(found: Record) -> Outcome:
    """Return how the rehearsal has ended: the first of these conditions that applies."""
    error, idle = found.unresolved_oom, bool(found.end.get("idle"))
    conditions = {
        Outcome.OUT_OF_MEMORY: found.out_of_memory is not None,
        Outcome.INTERRUPTED: found.interrupted,
        Outcome.TIMED_OUT: found.timeout is not None,
        Outcome.USED_ELSEWHERE: bool(found.child),
        Outcome.HANGS: bool(found.hang),
        Outcome.KILLED: found.status < 0,
        Outcome.FAILED: found.status > 0,
        Outcome.UNREPORTED_OOM: error is not None and not error["in_search"],  # a search causes them on purpose
        Outcome.SECOND_STEP_TOO_LARGE: found.second_step_bytes > found.usable_bytes,
        Outcome.IDLE_OPTIMIZER: idle and bool(found.end.get("stopped")) and len(found.steps) < ENOUGH_STEPS,
        Outcome.IDLE_RANK: bool(found.idle_ranks) and 1 < len(found.rank_peaks) < found.ranks,
        Outcome.DEPENDS: bool(found.too_large),
        Outcome.UNUSED: not any(each["reserved_bytes"] for each in found.all_peaks),
    }
    return next((each for each, applies in conditions.items() if applies), Outcome.FITS)


def fits(found: Record) -> bool | None:
    """Return True if the script fits, False if it ran out of memory, None if there is no answer."""
    return {Outcome.FITS: True, Outcome.OUT_OF_MEMORY: False}.get(outcome(found))


def verdict(found: Record) -> str:
    """Return the result in one line."""
    step = len(found.steps) + 1
    match outcome(found):
        case Outcome.FITS:
            scope = f" in the first {count_of(len(found.steps), 'step')}" * bool(found.end.get("stopped"))
            why = f"fits{scope}: {_most_reserved(found)}{_remarks(found)}"
        case Outcome.OUT_OF_MEMORY:
            why = f"does not fit: {_out_of_memory_text(found)}"
        case Outcome.INTERRUPTED:
            before = f"; before that, {_most_reserved(found)}" if found.all_peaks else ""
            when = "in the rehearsals with random values" if found.untried else f"in step {step}{_at_line(found)}"
            why = f"interrupted {when}{before}"
        case Outcome.TIMED_OUT:
            why = f"the script did not end within {found.timeout:g} s and was killed in step {step}: raise --timeout"
            why += _last_read(found)
        case Outcome.USED_ELSEWHERE:
            command = re.sub(r"^\S*python[\d.]* (-\w )*", "", found.child)
            remedy = f"rehearse that command instead, with --ranks: {command}"
            if re.search("multiprocessing|gpu_rehearsal", command):
                remedy = "move the function that it runs to a separate script, and rehearse that, with --ranks"
            why = f"the script starts processes that use a GPU, which a rehearsal cannot follow: {remedy}"
        case Outcome.HANGS:
            return explain.verdict(found.hang)
        case Outcome.KILLED:
            out_of_host_memory = " (is this machine out of memory?)" * (found.status == -signal.SIGKILL)
            cause = out_of_host_memory or f": {found.last_error}" * bool(found.last_error)
            name = f"signal {-found.status} ({signal.strsignal(-found.status)})"
            why = f"{name} ended the script in step {step}{cause}"
        case Outcome.FAILED:
            why = _failure_text(found)
        case Outcome.UNREPORTED_OOM:
            why = (
                f"memory ran out in step {step}, and no step followed, but the script ended with success: it "
                "caught the error, or the error ended a thread"
            )
        case Outcome.SECOND_STEP_TOO_LARGE:
            needs = f"{gib(found.second_step_bytes)} of {gib(found.usable_bytes)} GiB allocated"
            why = f"the only step fits, but another would need about {needs}: rehearse two steps"
        case Outcome.IDLE_OPTIMIZER:
            after = count_of(len(found.steps), "step")
            why = f"an optimizer took no step in {after}, so its state and its gradients are missing: raise --steps"
        case Outcome.IDLE_RANK:
            why = (
                f"no optimizer took a step on {ranks_named(found.idle_ranks)}: if a value of a rank that did not run "
                "decides this, add that rank to --together"
            )
        case Outcome.DEPENDS:
            why = (
                f"fits with {_most_reserved(found)}, but runs out of memory with {values_at(found.too_large)}: "
                f"state the value (--fixed {place_in(found.too_large)}=N)"
            )
        case Outcome.UNUSED:
            what = "trained" if found.steps else "took no optimizer step"
            why = f"the script {what}, but its process allocated no GPU memory"
    return why if fits(found) is not None else f"no answer: {why}"


def _guessed(found: Record) -> str:
    """Return the part of the verdict about guessed values that may raise the peak, or lower it much."""
    peaks = [size for each in found.tried if (size := each["reserved_bytes"])] + [found.run_peaks["reserved_bytes"]]
    differ = min(peaks) < MUCH_LESS * max(peaks)
    tried = [
        each
        for each in found.tried
        if each["place"].startswith(FIRST)
        or (each["place"] != USUAL and (each["higher"] or (differ and not each["failed"])))
    ]
    places = [place_in(each["place"]) for each in tried] + found.routing
    recent = {each["at"] for each in found.reads[-ENDLESS:]} - {END}
    if found.out_of_memory and len(recent) == 1 and len(found.reads) >= ENDLESS:  # in a loop
        places += recent
    failed = [each["place"] for each in found.tried if each["failed"] and each not in tried]
    ends = f"{gib(min(peaks))} to {gib(max(peaks))} GiB, " * (len(peaks) > 1)
    return f"; memory depends on a guessed value at {shortened(places)} ({ends}see below)" * bool(
        places
    ) + f"; other values at {shortened(failed)} end in an error, so they were not tried (see below)" * bool(failed)


def _out_of_memory_text(found: Record) -> str:
    error = found.out_of_memory
    assert error is not None
    if error["in_search"] and found.message:
        return found.message
    allocated = f"{gib(error['allocated_bytes'])} of {gib(found.usable_bytes)} GiB allocated"
    if (limit := int(error["allowed_bytes"])) < found.usable_bytes:  # the script has limited itself
        allocated = f"{size_of(error['allocated_bytes'])} allocated of the script's limit of {size_of(limit)}"
    when = f" in step {error['step']}" if error["has_optimizer"] else ""
    where = f" on device {error['device']}" if len(found.devices) > 1 else _on_rank(found)
    return f"out of memory{when}{where}, {allocated}, {size_of(error['asked_bytes'])} more requested{_guessed(found)}"


def _failure_text(found: Record) -> str:
    why = str(found.message or found.end.get("error") or f"exit status {found.status}")
    if why.startswith("exit status") and found.last_error:
        why = found.last_error
    if why.startswith("CannotRehearse: "):
        return why.partition(": ")[2]
    hints = "".join(f" ({hint})" for error, hint in _HINTS.items() if re.search(error, why))
    memory = "; it ran out of memory before (see below)" if found.unresolved_oom else ""
    memory += _last_read(found) + _guessed(found)
    return f"the script failed in step {len(found.steps) + 1}{_at_line(found)}: {why}{hints}{memory}"


def _last_read(found: Record) -> str:
    at = found.last_read if found.places_read else ""
    return f"; the last guessed value was read at {at} (to state it: --fixed {at}=N)" * bool(at)


def _at_line(found: Record) -> str:
    line = str(found.end.get("lines", "")).partition(" < ")[0]
    return f" at {line}" * bool(line)


def _remarks(found: Record) -> str:
    """Return the parts of the verdict that follow the peak of a script that fits; each applies under a condition."""
    flushing, steps = sum(each["flushes"] > 0 for each in found.steps), count_of(len(found.steps), "step")
    second, errors = found.second_step_bytes, count_of(len(found.caught), "out-of-memory error")
    remarks = {
        "; the cache was flushed": not found.steps and found.end["flushes"],
        "; no optimizer took a step": not found.steps,
        f"; the cache is flushed in {flushing} of {steps}": flushing,
        f"; the cache is never flushed{f' ({steps})' * (not found.end.get('stopped'))}": found.steps and not flushing,
        f"; the script recovered from {errors}": found.steps and found.caught,
        LARGER.format_map(defaultdict(int, found.later_batch)): "batch" in found.later_batch,
        GROWING.format_map(defaultdict(int, found.later_batch)): "first" in found.later_batch,
        _guessed(found): True,
        f"; other values were not tried at {shortened(found.untried)}": found.untried,
        "; hangs if one rank alone reads other values, unless they are all-reduced (see below)": found.hang_of_one,
        f"; the number of steps depends on a guessed value at {found.ended_by}": found.ended_by,
        "; not all memory is counted (see below)": any("more memory" in each for each in found.end.get("notes", ())),
        "; an optimizer took no step": found.steps and found.end.get("idle"),
        f"; a second step would need about {size_of(second)} allocated": second,
    }
    return "".join(remark for remark, applies in remarks.items() if applies)


def _most_reserved(found: Record) -> str:
    most = max(found.all_peaks, key=lambda each: int(each["reserved_bytes"]))
    when = f" (step {most['step']})" if most["step"] else " (after the last step)" if found.steps else ""
    where = _on_rank(found)
    if len(found.devices) > 1:
        fullest = max(found.devices, key=lambda each: each["reserved_bytes"])
        where = f" on device {fullest['device']} of {len(found.devices)}"
    return f"{gib(most['reserved_bytes'])} of {gib(found.usable_bytes)} GiB reserved at most{where}{when}"


def _on_rank(found: Record) -> str:
    return f" on rank {found.rank} of {found.ranks}" if len(found.rank_peaks) > 1 else ""


def values_at(place: str) -> str:
    """Describe a rehearsal by the place with random values."""
    return place if place.startswith((USUAL, NOT_FINITE, FIRST)) else f"random values at {place}"


def shortened(places: list[str]) -> str:
    """List the first places, and the number of the others."""
    more = len(places) - SHOWN_PLACES
    return ", ".join(places[:SHOWN_PLACES]) + f" and {more} more" * (more > 0)


def gib(size: int) -> str:
    """Format bytes as GiB, without the unit."""
    return f"{size / GIB:.1f}" if size >= 10 * GIB else f"{size / GIB:.2f}"


def size_of(size: int) -> str:
    """Format bytes as GiB or MiB."""
    return f"{gib(size)} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
