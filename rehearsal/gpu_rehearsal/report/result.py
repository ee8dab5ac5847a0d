"""The result of a rehearsal: a verdict, a table, and JSON."""

from __future__ import annotations

import json
import re
import signal
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

from gpu_rehearsal.formatting import count_of
from gpu_rehearsal import hangs
from gpu_rehearsal.gpus import Gpu
from gpu_rehearsal.report.step_time import StepTime, Work, estimate, time_lines

GIB = 2**30
SHOWN_STEPS, SHOWN_PLACES = 20, 3
COMPARED = "compared"
"""The file with the result of comparing the calls of all ranks."""
USUAL, NOT_FINITE = "the values of the first rehearsal", "NaN at "
"""Descriptions of rehearsals, besides places with random values."""
MOST_READS = 20_000
"""Reads that are recorded."""
ENDLESS = 16
"""A place that was read this many times without another seems to be the condition of an endless loop."""
END_OF_STEP, END = "end of step", "end"
"""Moments at which the total of allocated bytes is recorded, besides reads of guessed values."""
PARAMETERS, GRADIENTS, OPTIMIZER, OTHER = "parameters", "gradients", "optimizer", "activations and other"
"""Kinds of memory."""
_ROUTING = (
    "tokens were spread evenly over the experts that are counted at {places}: a rank whose experts get more tokens "
    "needs more memory (try --skew 2)"
)
_HINTS = {
    r"ZeroDivisionError|FloatingPointError|ValueError: (math domain error|expected a positive input|Total of weights)"
    r"|probabilities do not sum": "a rehearsal reads numbers of the GPU as 0",
    r"KeyError: '(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)'": "torchrun sets it: put torchrun before the script",
    r"invalid device ordinal|You requested gpu|[Ii]nvalid device (id|index)|device_id cuda:": "for several processes, "
    "pass --ranks; for several GPUs in one process, --devices",
}
"""Explanations of a script's errors in a rehearsal, by pattern."""
NEEDS_OTHERS = "not supported with a fake process group"
"""Part of the error of a rank that runs alone, but exchanges messages with another: torch's pipelines have it, too."""
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
    DEPENDS = auto()
    """The script fits, but not with other values of the GPU."""
    UNUSED = auto()
    """The script allocated no memory of a GPU."""


@dataclass(frozen=True)
class RehearsalResult:
    """The peaks, the errors and the exit status of a rehearsed script, which are read from its record."""

    usable_bytes: int
    """The memory of the GPU without the overhead."""
    overhead_bytes: int
    """The memory of the CUDA context, NCCL and libraries."""
    rank: int
    ranks: int
    status: int
    """The script's exit status."""
    cpu_s: float = 0
    """The CPU seconds of the script's processes, of all its rehearsals if there were several."""
    interrupted: bool = False
    timeout: float | None = None
    """The seconds after which the script was killed; None if it ended earlier."""
    last_error: str = ""
    """The script's last line of standard error that looks like an error; if no line does, its last line."""
    steps: list[dict[str, int]] = field(default_factory=list)
    """The peaks and flushes of each step: step, allocated_bytes, reserved_bytes, flushes."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    """All out-of-memory errors of the allocator, including those that the script caught."""
    end: dict[str, Any] = field(default_factory=dict)
    """The peaks after the last step, and facts about the end of the script; empty if it was killed."""
    reads: list[dict[str, Any]] = field(default_factory=list)
    """The places where the script has read guessed values, and the bytes that it had allocated in total (`at`,
    `total_bytes`)."""
    routing: list[str] = field(default_factory=list)
    """Places that count the tokens of experts, which are spread evenly."""
    child: str = ""
    """The command line of a child process that used a GPU; empty if none did."""
    traced: dict[str, Any] = field(default_factory=dict)
    """The step whose work was recorded, and its work."""
    gpu: Gpu | None = None
    rank_peaks: list[dict[str, Any]] = field(default_factory=list)
    """Peaks of each rank that ran: rank, allocated_bytes, reserved_bytes."""
    searches: list[dict[str, Any]] = field(default_factory=list)
    """A recipe's searches: stage, text, result."""
    message: str = ""
    """The error message of a recipe."""
    output: str = ""
    """The complete output of the script, if it was not copied to standard error and there is no answer."""
    setting: str = ""
    """How a recipe was rehearsed without its data; empty if it had them."""
    unread: list[str] = field(default_factory=list)
    """Places whose value the user has stated, but that read no unknown value."""
    tried: list[dict[str, Any]] = field(default_factory=list)
    """Rehearsals with random values whose memory differs: the place that decides, the verdict, whether it needs more
    memory (`higher`) or has `failed`; and the one with the usual values, if this is not its result."""
    too_large: str = ""
    """The place that decides a rehearsal with random values that ran out of memory; empty if none did."""
    ended_by: str = ""
    """The last place that was read, if rehearsals with other values took more steps."""
    is_repeatable: bool = True
    """False if another rehearsal with the same values has allocated other memory."""
    collectives: int | None = None
    """Calls that the ranks have made together; None if one rank ran."""
    held: dict[str, Any] = field(default_factory=dict)
    """The bytes of each kind after the first update: held_bytes; empty if no optimizer took a step."""
    later_batch: dict[str, Any] = field(default_factory=dict)
    """A batch after the rehearsed steps that is larger: batch, elements, rehearsed, steps; empty if none is."""
    largest: int | None = None
    """The largest value of the range in the command that fits; 0 if none does; None without a range or an answer."""
    hang: dict[str, Any] = field(default_factory=dict)
    """Which ranks wait for which others (see `hangs.py`); empty if none do."""

    @classmethod
    def read(cls, path: Path, **about: Any) -> RehearsalResult:
        """Read a record. `about` has the other fields; the record's number of ranks takes precedence."""
        found = defaultdict[str, list[dict[str, Any]]](list)
        for line in path.read_text(errors="replace").split("\n") if path.exists() else ():
            with suppress(ValueError):  # the last line is incomplete if the script was killed
                record = json.loads(line)
                found[record.pop("kind")].append(record)
        for facts in found["process"]:
            about |= facts
        about["gpu"] = Gpu(*about["gpu"]) if about.get("gpu") else None
        return cls(
            **about,
            steps=found["step"],
            errors=found["out_of_memory"],
            end=dict(*found["end"][:1]),
            reads=found["read"],
            routing=[*dict.fromkeys(each["place"] for each in found["routing"])],
            child="".join(each["command"] for each in found["child"][:1]),
            # without data, answers end at once, so the time of a step is unknown
            traced=dict(*found["work"][-1:]) if all(each["timed"] for each in found["setting"]) else {},
            setting="".join(each["text"] for each in found["setting"]),
            held=dict(*found["held"][:1]),
            later_batch=dict(*found["later"]),
            searches=found["search"],
            message="".join(each["text"] for each in found["message"][-1:]),
        )

    @classmethod
    def read_ranks(cls, folder: Path, **about: Any) -> RehearsalResult:
        """Read a record for each rank. Return the first rank that failed, or else the fullest, with all peaks."""
        records = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)  # in the order of their ends
        ranks = {int(path.name): path for path in records if path.name.isdecimal()}
        ranks = ranks or {0: next((path for path in records if path.is_file()), folder / "0")}
        if (compared := folder / COMPARED).exists():
            about |= json.loads(compared.read_text())
        results = [cls.read(path, **{"ranks": len(ranks), "rank": rank, **about}) for rank, path in ranks.items()]
        if len(ranks) > 1 and not compared.exists():  # the process that compares the ranks has failed
            results = [replace(each, status=each.status or 1) for each in results]
        peaks = sorted(({"rank": each.rank, **each.run_peaks} for each in results), key=itemgetter("rank"))
        failed = [each for each in results if each.out_of_memory]
        failed = failed or [each for each in results if each.end.get("error") or not each.end]
        fullest = max(results, key=lambda each: (each.run_peaks["reserved_bytes"], -each.rank))
        return replace((failed or [fullest])[0], rank_peaks=peaks)

    @property
    def out_of_memory(self) -> dict[str, Any] | None:
        """The out-of-memory error that ended the script; None if it ended in another way."""
        error = str(self.end.get("error") or "exit status")
        by_memory = self.end.get("by_memory") or "out of memory" in error or error.startswith("exit status")
        failed = self.status > 0 or self.status == -signal.SIGABRT
        return self.unresolved_oom if failed and by_memory else None

    @property
    def unresolved_oom(self) -> dict[str, Any] | None:
        """The last out-of-memory error, if the script completed no step after it."""
        return self.errors[-1] if self.errors and self.errors[-1]["step"] > len(self.steps) else None

    @property
    def caught(self) -> list[dict[str, Any]]:
        """Out-of-memory errors that did not end the script."""
        return [each for each in self.errors if each is not self.out_of_memory and not each["in_search"]]

    @property
    def most_rows(self) -> int | None:
        """The largest value of a range that fits or, if a recipe has searched, the rows of its smallest microbatch."""
        found = [each["result"]["rows"] for each in self.searches if each["result"].get("rows")]
        return min(found, default=None) if self.largest is None else self.largest

    @cached_property
    def outcome(self) -> Outcome:
        """How the rehearsal has ended: the first of these conditions that applies."""
        error = self.unresolved_oom
        conditions = {
            Outcome.OUT_OF_MEMORY: self.out_of_memory is not None,
            Outcome.INTERRUPTED: self.interrupted,
            Outcome.TIMED_OUT: self.timeout is not None,
            Outcome.USED_ELSEWHERE: bool(self.child),
            Outcome.HANGS: bool(self.hang),
            Outcome.KILLED: self.status < 0,
            Outcome.FAILED: self.status > 0,
            Outcome.UNREPORTED_OOM: error is not None and not error["in_search"],  # a search causes them on purpose
            Outcome.SECOND_STEP_TOO_LARGE: self.second_step_bytes > self.usable_bytes,
            Outcome.IDLE_OPTIMIZER: bool(self.end.get("idle") and self.end.get("stopped")),
            Outcome.DEPENDS: bool(self.too_large),
            Outcome.UNUSED: not any(each["reserved_bytes"] for each in self.all_peaks),
        }
        return next((outcome for outcome, applies in conditions.items() if applies), Outcome.FITS)

    @property
    def fits(self) -> bool | None:
        """True if the script fits, False if it ran out of memory, None if there is no answer."""
        return {Outcome.FITS: True, Outcome.OUT_OF_MEMORY: False}.get(self.outcome)

    @property
    def _per_step(self) -> list[tuple[int, int]]:
        """For each step and the end: the bytes allocated so far in total, and the peak."""
        totals = (each["total_bytes"] for each in self.reads if each["at"] in (END_OF_STEP, END))
        return [*zip(totals, (each["allocated_bytes"] for each in self.all_peaks), strict=False)]

    def compare_to(self, usual: RehearsalResult) -> int:
        """Return 1 if this rehearsal with random values failed or needed more memory, -1 if it needed less."""
        if not self.fits or self.has_higher_peak_than(usual):
            return 1
        mine, theirs = self._per_step, usual._per_step
        if len(mine) != len(theirs):  # one has ended earlier: its end is not the end of a step
            mine, theirs = mine[:-1], theirs[:-1]
        differences = ((mine > theirs) - (mine < theirs) for mine, theirs in zip(mine, theirs, strict=False))
        return next(filter(None, differences), 0)

    def has_higher_peak_than(self, other: RehearsalResult, of: str = "allocated_bytes") -> bool:
        """Return True if this rehearsal had a higher peak of this memory."""
        return self.run_peaks[of] > other.run_peaks[of]

    @property
    def places_read(self) -> list[str]:
        """The places where the script has read guessed values, in the order of their first reads."""
        return [at for at in dict.fromkeys(each["at"] for each in self.reads) if at not in (END_OF_STEP, END)]

    @property
    def last_read(self) -> str:
        """The place that has read the last guessed value."""
        return str(next(each["at"] for each in reversed(self.reads) if each["at"] not in (END_OF_STEP, END)))

    def reads_before_difference(self, other: RehearsalResult) -> list[str]:
        """Return the places that have read values before another rehearsal differed from this one, the last first."""
        pairs = zip(self.reads, other.reads, strict=False)
        same = [mine["at"] for mine, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return [at for at in dict.fromkeys(reversed(same)) if at not in (END_OF_STEP, END)]

    def with_random_values(self, others: Mapping[str, RehearsalResult]) -> RehearsalResult:
        """Return the result with the highest peak: this one, or one with random values.

        If one of them has run out of memory, there is no answer. `others` has the place that has decided each of them.
        """
        worst = max((self, *others.values()), key=lambda each: each.run_peaks["reserved_bytes"] if each.fits else 0)
        runs = {**others, USUAL: self} if worst is not self else others
        return replace(
            worst,
            too_large=next((place for place, each in others.items() if each.out_of_memory), ""),
            is_repeatable=self.is_repeatable,
            tried=[
                {
                    "place": place,
                    "verdict": each.verdict().partition("; ")[0],
                    "higher": each.fits is not None
                    and any(mine[1] > theirs[1] for mine, theirs in zip(each._per_step, self._per_step, strict=False)),
                    "failed": each.fits is None,
                }
                for place, each in runs.items()
            ],
        )

    @property
    def second_step_bytes(self) -> int:
        """The estimated peak of a second step; 0 unless the script took one step and then allocated optimizer state."""
        first = self.steps[0]["allocated_bytes"] if len(self.steps) == 1 and not self.unresolved_oom else 0
        state = int(self.held["held_bytes"].get(OPTIMIZER, 0)) if self.held else 0
        return first + state if first and state > 0.02 * first else 0

    @property
    def all_peaks(self) -> list[dict[str, Any]]:
        """The peaks of each step and after the last one."""
        return [*self.steps, *([{**self.end, "step": None}] if self.end else [])]

    @property
    def run_peaks(self) -> dict[str, int]:
        """The peaks of the whole run, including those at out-of-memory errors, but not those of a search."""
        every = *self.all_peaks, *(each for each in self.errors if not each["in_search"] or each is self.unresolved_oom)
        return {name: max((each[name] for each in every), default=0) for name in ("allocated_bytes", "reserved_bytes")}

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """The peak of allocated memory by kind; empty if unknown.

        After an out-of-memory error, this is what was allocated. Otherwise, parameters, gradients and optimizer state
        are those after the first update, and the rest of the peak counts as activations.
        """
        if self.out_of_memory:
            return dict(self.out_of_memory["held_bytes"])
        kinds = {kind: self.held["held_bytes"].get(kind, 0) for kind in (PARAMETERS, GRADIENTS, OPTIMIZER) if self.held}
        return kinds and {**kinds, OTHER: self.run_peaks["allocated_bytes"] - sum(kinds.values())}

    def verdict(self) -> str:
        """Return the result in one line."""
        step = len(self.steps) + 1
        match self.outcome:
            case Outcome.FITS:
                scope = f" in the first {count_of(len(self.steps), 'step')}" * bool(self.end.get("stopped"))
                why = f"fits{scope}: {self._most_reserved}{self._remarks}"
            case Outcome.OUT_OF_MEMORY:
                why = f"does not fit: {self._out_of_memory_text}"
            case Outcome.INTERRUPTED:
                before = f"; before that, {self._most_reserved}" if self.all_peaks else ""
                why = f"interrupted in step {step}{self._at_line}{before}"
            case Outcome.TIMED_OUT:
                why = f"the script did not end within {self.timeout:g} s and was killed in step {step}: raise --timeout"
                why += self._last_read
            case Outcome.USED_ELSEWHERE:
                command = re.sub(r"^\S*python[\d.]* (-\w )*", "", self.child)
                remedy = f"rehearse that command instead, with --ranks: {command}"
                if re.search("multiprocessing|rehearse.run_script", command):
                    remedy = "move the function that it runs to a separate script, and rehearse that, with --ranks"
                why = f"the script starts processes that use a GPU, which a rehearsal cannot follow: {remedy}"
            case Outcome.HANGS:
                return hangs.verdict(self.hang)
            case Outcome.KILLED:
                out_of_host_memory = " (is this machine out of memory?)" * (self.status == -signal.SIGKILL)
                cause = out_of_host_memory or f": {self.last_error}" * bool(self.last_error)
                name = f"signal {-self.status} ({signal.strsignal(-self.status)})"
                why = f"{name} ended the script in step {step}{cause}"
            case Outcome.FAILED:
                why = self._failure_text
            case Outcome.UNREPORTED_OOM:
                why = (
                    f"memory ran out in step {step}, and no step followed, but the script ended with success: it "
                    "caught the error, or the error ended a thread"
                )
            case Outcome.SECOND_STEP_TOO_LARGE:
                needs = f"{_gib(self.second_step_bytes)} of {_gib(self.usable_bytes)} GiB allocated"
                why = f"the only step fits, but another would need about {needs}: rehearse two steps"
            case Outcome.IDLE_OPTIMIZER:
                after = count_of(len(self.steps), "step")
                why = f"an optimizer took no step in {after}, so its state and its gradients are missing: raise --steps"
            case Outcome.DEPENDS:
                why = (
                    f"fits with {self._most_reserved}, but runs out of memory with {_values_at(self.too_large)}: "
                    f"state the value (--fixed {self.too_large.removeprefix(NOT_FINITE)}=N)"
                )
            case Outcome.UNUSED:
                what = "trained" if self.steps else "took no optimizer step"
                why = f"the script {what}, but its process allocated no GPU memory"
        return why if self.fits is not None else f"no answer: {why}"

    @property
    def guesses(self) -> list[str]:
        """The places that read a value on which memory depends."""
        return [each["place"].removeprefix(NOT_FINITE) for each in self.tried if each["place"] != USUAL]

    @property
    def _guessed(self) -> str:
        """The part of the verdict about guessed values that may raise the peak."""
        places = [each["place"].removeprefix(NOT_FINITE) for each in self.tried if each["higher"]]
        places += self.routing
        recent = {each["at"] for each in self.reads[-ENDLESS:]} - {END}
        if self.out_of_memory and len(recent) == 1 and len(self.reads) >= ENDLESS:  # in a loop
            places += recent
        failed = [each["place"] for each in self.tried if each["failed"]]
        return f"; memory depends on a guessed value at {_shortened(places)} (see below)" * bool(
            places
        ) + f"; the script failed with other values at {_shortened(failed)} (see below)" * bool(failed)

    @property
    def _out_of_memory_text(self) -> str:
        error = self.out_of_memory
        assert error is not None
        if error["in_search"] and self.message:
            return self.message
        allocated = f"{_gib(error['allocated_bytes'])} of {_gib(self.usable_bytes)} GiB allocated"
        if (limit := int(error["allowed_bytes"])) < self.usable_bytes:  # the script has limited itself
            allocated = f"{_size(error['allocated_bytes'])} allocated of the script's limit of {_size(limit)}"
        when = f" in step {error['step']}" if error["has_optimizer"] else ""
        where = f" on device {error['device']}" if len(self.devices) > 1 else self._on_rank
        return f"out of memory{when}{where}, {allocated}, {_size(error['asked_bytes'])} more requested{self._guessed}"

    @property
    def _failure_text(self) -> str:
        why = str(self.message or self.end.get("error") or f"exit status {self.status}")
        if why.startswith("exit status") and self.last_error:
            why = self.last_error
        if why.startswith("CannotRehearse: "):
            return why.partition(": ")[2]
        hints = "".join(f" ({hint})" for error, hint in _HINTS.items() if re.search(error, why))
        memory = "; it ran out of memory before (see below)" if self.unresolved_oom else ""
        memory += self._last_read + self._guessed
        return f"the script failed in step {len(self.steps) + 1}{self._at_line}: {why}{hints}{memory}"

    @property
    def _last_read(self) -> str:
        at = self.last_read if self.places_read else ""
        return f"; the last guessed value was read at {at} (to state it: --fixed {at}=N)" * bool(at)

    @property
    def _at_line(self) -> str:
        line = str(self.end.get("lines", "")).partition(" < ")[0]
        return f" at {line}" * bool(line)

    @property
    def _remarks(self) -> str:
        """The parts of the verdict that follow the peak of a script that fits; each applies under a condition."""
        flushing, steps = sum(each["flushes"] > 0 for each in self.steps), count_of(len(self.steps), "step")
        second, errors = self.second_step_bytes, count_of(len(self.caught), "out-of-memory error")
        remarks = {
            "; the cache was flushed": not self.steps and self.end["flushes"],
            "; no optimizer took a step": not self.steps,
            f"; the cache is flushed in {flushing} of {steps}": flushing,
            f"; the cache is never flushed{f' ({steps})' * (not self.end.get('stopped'))}": self.steps and not flushing,
            f"; the script recovered from {errors}": self.steps and self.caught,
            LARGER.format_map(defaultdict(int, self.later_batch)): self.later_batch,
            self._guessed: True,
            f"; the number of steps depends on a guessed value at {self.ended_by}": self.ended_by,
            "; not all memory is counted (see below)": any("more memory" in each for each in self.end.get("notes", ())),
            "; an optimizer took no step": self.steps and self.end.get("idle"),
            f"; a second step would need about {_size(second)} allocated": second,
        }
        return "".join(remark for remark, applies in remarks.items() if applies)

    @property
    def _most_reserved(self) -> str:
        most = max(self.all_peaks, key=lambda each: int(each["reserved_bytes"]))
        when = f" (step {most['step']})" if most["step"] else " (after the last step)" if self.steps else ""
        where = self._on_rank
        if len(self.devices) > 1:
            fullest = max(self.devices, key=lambda each: each["reserved_bytes"])
            where = f" on device {fullest['device']} of {len(self.devices)}"
        return f"{_gib(most['reserved_bytes'])} of {_gib(self.usable_bytes)} GiB reserved at most{where}{when}"

    @property
    def _on_rank(self) -> str:
        return f" on rank {self.rank} of {self.ranks}" if len(self.rank_peaks) > 1 else ""

    @property
    def devices(self) -> list[dict[str, int]]:
        """The peaks of each device that the process used."""
        return list(self.end.get("devices", []))

    @cached_property
    def work(self) -> Work | None:
        """The work of the recorded step; None if no step was recorded."""
        work = Work.from_json(self.traced["work"]) if self.traced else None
        return work if work and work.operations else None

    def recorded_time(self) -> StepTime | None:
        """Estimate the recorded step."""
        return estimate(self.work, self.gpu.rates) if self.work and self.gpu and self.gpu.rates else None

    def _time_as_dict(self) -> dict[str, Any] | None:
        time, work = self.recorded_time(), self.work
        if time is None or work is None or self.gpu is None:
            return None
        return {"gpu": self.gpu.name, "step": self.traced["step"], **time.as_dict(), **work.totals(self.ranks)}

    def as_text(self) -> str:
        """Return the verdict, the searches, the steps, and what holds the memory after an out-of-memory error."""
        searches = [[search["text"]] for search in self.searches]
        time = self.recorded_time()
        peaks = [_peak_lines("device", self.devices), _peak_lines("rank", self.rank_peaks)]
        if self.outcome is Outcome.HANGS:
            return "\n".join([self.verdict(), "", *hangs.as_lines(self.hang)])
        fits = [f"largest that fits: {self.largest}" if self.largest else "none fits; the smallest:"]
        searched = [fits] * bool(self.largest or (self.largest == 0 and self.out_of_memory))
        sections = [
            *searched,
            [self.verdict()],
            *searches,
            self._step_lines(),
            time_lines(time, self.work, self.gpu.name, self.ranks) if time and self.work and self.gpu else [],
            *peaks,
            self._error_lines(),
        ]
        if self.fits or self.steps or self.errors or self.guesses:
            sections.append(self._condition_lines())
        return "\n\n".join("\n".join(lines) for lines in sections if lines)

    def _step_lines(self) -> list[str]:
        shown, left_out = self.steps[:SHOWN_STEPS], len(self.steps[SHOWN_STEPS:])
        return [
            *[f"{'step':>6}  {'allocated':>9}  {'reserved':>9}  flushes   (peaks, GiB)"] * bool(shown),
            *(
                f"{each['step']:>6}  {_gib(each['allocated_bytes']):>9}  {_gib(each['reserved_bytes']):>9}  "
                f"{each['flushes'] or '':>7}".rstrip()
                for each in shown
            ),
            *[f"  {left_out} more steps are not shown"] * bool(left_out),
        ]

    def _error_lines(self) -> list[str]:
        if (error := self.unresolved_oom) is None or self.fits:
            return []
        cached = error["reserved_bytes"] - error["allocated_bytes"]
        return [
            f"at {error['file']}:{error['line']}: {error['source']}",
            *[f"in {error['operation']}"] * (error["operation"] != error["source"]),
            f"requested {_size(error['asked_bytes'])}; "
            f"free {_size(error['free_bytes'])} on the GPU, {_size(cached)} in the allocator's cache",
            *(f"{_gib(held):>9} GiB  {holder}" for holder, held in error["held_bytes"].items() if held > GIB // 200),
        ]

    def _condition_lines(self) -> list[str]:
        places = self.places_read if self.out_of_memory else []
        return [
            f"rank {self.rank} of {self.ranks}; of {_size(self.usable_bytes + self.overhead_bytes)} of GPU "
            f"memory, {_size(self.overhead_bytes)} are for the CUDA context, NCCL and libraries (--memory-overhead)",
            *[self.setting] * bool(self.setting),
            "kernels did not run: every loss is 0, and branches on values may differ in training",
            *[_ROUTING.format(places=_shortened(self.routing))] * bool(self.routing),
            *["another rehearsal with the same values differs: does the script find files that it has written?"]
            * (not self.is_repeatable),
            *(f"with {_values_at(each['place'])}: {each['verdict']}" for each in self.tried),
            *[f"guessed values were read at {_shortened(places)}: with others, it may fit"] * bool(places),
            *["to state a value: --fixed FILE:LINE=N"] * bool(self.tried or places),
            *(f"--fixed {place}=N has no effect: this line reads no unknown value" for place in self.unread),
            *["later steps may need more memory: --steps 0 runs to the end"] * bool(self.end.get("stopped")),
            *self.end.get("notes", ()),
            *[f"{self.collectives or 0:,} collectives compared: all ranks agree"] * bool(self.collectives),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        same = (
            "rank", "ranks", "usable_bytes", "overhead_bytes", "rank_peaks", "out_of_memory", "caught",
            "guesses", "routing", "tried", "ended_by", "later_batch",
        )  # fmt: skip
        return {
            "fits": self.fits,
            "verdict": self.verdict(),
            **{name: getattr(self, name) for name in same},
            "places_read": self.places_read,
            "peak_by_kind": self.peak_by_kind,
            "largest": self.largest,
            "searches": self.searches,
            "steps": self.steps,
            "time": self._time_as_dict(),
            "hang": self.hang if self.outcome is Outcome.HANGS else None,
            "collectives": self.collectives,
            "after_last_step": self.end,
            "script_status": self.status,
            "cpu_s": self.cpu_s,
        }


def _values_at(place: str) -> str:
    return place if place.startswith((USUAL, NOT_FINITE)) else f"random values at {place}"


def _shortened(places: list[str]) -> str:
    more = len(places) - SHOWN_PLACES
    return ", ".join(places[:SHOWN_PLACES]) + f" and {more} more" * (more > 0)


def _peak_lines(name: str, peaks: list[dict[str, Any]]) -> list[str]:
    """Return a table of the peaks of several devices or ranks."""
    if len(peaks) < 2:
        return []
    rows = (f"{each[name]:>6}  {_gib(each['allocated_bytes']):>9}  {_gib(each['reserved_bytes']):>9}" for each in peaks)
    return [f"{name:>6}  {'allocated':>9}  {'reserved':>9}   (peaks of the run, GiB)", *rows]


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size >= 10 * GIB else f"{size / GIB:.2f}"


def _size(size: int) -> str:
    return f"{_gib(size)} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
