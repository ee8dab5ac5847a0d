"""The record of a rehearsal: what the processes have written, how they ended, and the peaks that follow from it."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

from gpu_rehearsal.gpus import Gpu
from gpu_rehearsal.report.step_time import StepTime, Work, estimate

GIB = 2**30
COMPARED = "compared"
"""The file with the result of comparing the calls of all ranks."""
USUAL, NOT_FINITE, FIRST = "the values of the first rehearsal", "NaN at ", "the value of the first rehearsal at "
"""Descriptions of rehearsals, besides places with random values."""
MOST_READS = 20_000
"""Reads that are recorded."""
END_OF_STEP, END = "end of step", "end"
"""Moments at which the total of allocated bytes is recorded, besides reads of guessed values."""
PARAMETERS, GRADIENTS, OPTIMIZER, OTHER = "parameters", "gradients", "optimizer", "activations and other"
"""Kinds of memory."""
NEEDS_OTHERS = "not supported with a fake process group"
"""Part of the error of a rank that runs alone, but exchanges messages with another: torch's pipelines have it, too."""


@dataclass(frozen=True)
class Record:
    """The peaks, the errors and the exit status of a rehearsed script."""

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
    """The places where the script has read guessed values, or checked for NaN or infinity, and the bytes that it had
    allocated in total (`at`, `total_bytes`, `is_check`)."""
    decisions: list[str] = field(default_factory=list)
    """The places of guessed values that may decide something, on any rank: the script does not only show them."""
    routing: list[str] = field(default_factory=list)
    """Places that count the tokens of experts, which are spread evenly."""
    child: str = ""
    """The command line of a child process that used a GPU; empty if none did."""
    traced: dict[str, Any] = field(default_factory=dict)
    """The step whose work was recorded, and its work."""
    gpu: Gpu | None = None
    rank_peaks: list[dict[str, Any]] = field(default_factory=list)
    """Peaks of each rank that ran: rank, allocated_bytes, reserved_bytes."""
    groups: list[list[int]] = field(default_factory=list)
    """The ranks of each group that this rank has created."""
    kinds: int = 0
    """How many different sequences of collectives the ranks that ran have made."""
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
    memory (`higher`) or has `failed`, and the peak of reserved memory; and the one with the usual values, if this is
    not its result."""
    untried: list[str] = field(default_factory=list)
    """Places that read guessed values, if the script was not rehearsed again with random ones."""
    too_large: str = ""
    """The place that decides a rehearsal with random values that ran out of memory; empty if none did."""
    ended_by: str = ""
    """The last place that was read, if rehearsals with other values took more steps."""
    is_repeatable: bool = True
    """False if another rehearsal with the same values has allocated other memory."""
    idle_ranks: list[int] = field(default_factory=list)
    """The ranks that took no step, although they have an optimizer."""
    collectives: int | None = None
    """Calls that the ranks have made together; None if one rank ran."""
    held: dict[str, Any] = field(default_factory=dict)
    """The bytes of each kind after the first update: held_bytes; empty if no optimizer took a step."""
    later_batch: dict[str, Any] = field(default_factory=dict)
    """A batch after the rehearsed steps that is larger: batch, elements, rehearsed, steps. If none is, but the largest
    batch of each epoch is larger than that of the one before: its elements in the `first` and the `last`."""
    largest: int | None = None
    """The largest value of the range in the command that fits; 0 if none does; None without a range or an answer."""
    out_of_reduced: dict[str, Any] = field(default_factory=dict)
    """If the peak is above the recorded one: the out-of-memory error of another rehearsal with less memory."""
    hang: dict[str, Any] = field(default_factory=dict)
    """Which ranks wait for which others (see `hangs.py`); empty if none do."""
    hang_of_one: dict[str, Any] = field(default_factory=dict)
    """The hang if one rank alone reads other values; empty if there is none."""

    @classmethod
    def read(cls, path: Path, **about: Any) -> Self:
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
            decisions=[each["place"] for each in found["decision"]],
            routing=[*dict.fromkeys(each["place"] for each in found["routing"])],
            child="".join(each["command"] for each in found["child"][:1]),
            # without data, answers end at once, so the time of a step is unknown
            traced=dict(*found["work"][-1:]) if all(each["timed"] for each in found["setting"]) else {},
            setting="".join(each["text"] for each in found["setting"]),
            held=dict(*found["held"][:1]),
            groups=[each["ranks"] for each in found["group"]],
            later_batch=dict(*found["later"]),
            searches=found["search"],
            message="".join(each["text"] for each in found["message"][-1:]),
        )

    @classmethod
    def read_ranks(cls, folder: Path, **about: Any) -> Self:
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
        decisions = [*dict.fromkeys(place for each in results for place in each.decisions)]
        idle = sorted(each.rank for each in results if each.end.get("idle") and not each.steps)
        return replace((failed or [fullest])[0], rank_peaks=peaks, decisions=decisions, idle_ranks=idle)

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

    @property
    def places_read(self) -> list[str]:
        """The places where the script has read guessed values, in the order of their first reads."""
        reads = (each["at"] for each in self.reads if not each["is_check"])
        return [at for at in dict.fromkeys(reads) if at not in (END_OF_STEP, END)]

    @property
    def last_read(self) -> str:
        """The place that has read the last guessed value."""
        return str(next(each["at"] for each in reversed(self.reads) if each["at"] not in (END_OF_STEP, END)))

    @property
    def guesses(self) -> list[str]:
        """The places that read a value on which memory depends."""
        return [place_in(each["place"]) for each in self.tried if each["place"] != USUAL]


def place_in(description: str) -> str:
    """Return the place in the description of a rehearsal."""
    return description.removeprefix(NOT_FINITE).removeprefix(FIRST)
