"""What the record of a run says of its limits, and of the time that was lost: numbers, for a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeGuard

from torchtune_adaptive.limits.change import EXHAUSTED, GROWTH, RECOVERY, THRASHING, TRIAL
from torchtune_adaptive.record.events import EPOCH
from torchtune_adaptive.record.timeline import Record, Timeline, is_number

CHANGES = (EPOCH, RECOVERY, THRASHING, TRIAL, GROWTH, EXHAUSTED)
TRAINED = "policy"
"""The stage of which records from before each stage had its own tell when an epoch begins: the only one that did so was
that of preference training."""
AFTER = 0.5
"""What happened after a step stands between that one and the next; what happened within it, at its number."""


class Mark(NamedTuple):
    kind: str
    at: float
    size: float
    """The limit that it changed: one that did not fit, or one that was grown from."""


class Spell(NamedTuple):
    """Steps in which a limit was lower than it had been."""

    begins: float
    ends: float
    size: float
    instead_of: float


@dataclass
class LimitCourse:
    """A limit over the steps of a run."""

    stage: str
    """Empty where a step has only one."""
    unit: str
    at: list[float] = field(default_factory=list)
    """Where it changes, in steps; it stays until the next one."""
    sizes: list[float] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    @property
    def highest(self) -> list[float]:
        """The most up to each change."""
        return list(accumulate(self.sizes, max))

    def spells(self, end: float) -> list[Spell]:
        """Where it was lower than it had been, up to the end of the run."""
        found: list[Spell] = []
        for spell in map(Spell._make, zip(self.at, [*self.at[1:], end], self.sizes, self.highest, strict=True)):
            if found and (found[-1].ends, *found[-1][2:]) == (spell.begins, *spell[2:]):  # over the end of an epoch
                found[-1] = found[-1]._replace(ends=spell.ends)
            elif spell.size < spell.instead_of:
                found.append(spell)
        return found


def courses(timeline: Timeline) -> list[LimitCourse]:
    """The limits that the record has: one, as a rule; one of each stage, and of each unit that a run went on with."""
    found: dict[tuple[str, str], LimitCourse] = {}
    unnamed = TRAINED if any(_stage(event) for event in timeline.events) else ""
    for event in timeline.events:
        unit, before_training = event.get("unit"), event["kind"] != EPOCH and event["step"] == 0
        if (
            event["kind"] in CHANGES
            and isinstance(unit, str)
            and _is_size(event.get("after"))
            and not before_training  # when the reference was asked once for all: it has no part in the steps
        ):
            stage = _stage(event) or unnamed
            _follow(found.setdefault((stage, unit), LimitCourse(stage, unit)), event)
    return list(found.values())


def _stage(event: Record) -> str:
    stage = event.get("stage")
    return stage if isinstance(stage, str) else ""


def _is_size(value: object) -> TypeGuard[float]:
    return is_number(value) and value > 0


def _follow(course: LimitCourse, event: Record) -> None:
    kind, step, before, after = event["kind"], event["step"], event.get("before"), event["after"]
    known_before = float(before) if _is_size(before) else None
    at = step + AFTER if kind in (GROWTH, EPOCH) else float(step)
    if not course.at and known_before is not None:  # a record from before epochs were told
        course.at.append(AFTER)
        course.sizes.append(known_before)
    course.at.append(at)
    course.sizes.append(float(after))
    if kind != EPOCH:
        course.marks.append(Mark(kind, at, known_before or float(after)))


def recoveries(timeline: Timeline) -> int:
    return sum(event["kind"] == RECOVERY for event in timeline.events)


def ended_in(timeline: Timeline) -> int | None:
    """The step that ran out of memory for good; None where the run has gone on or ended in another way."""
    last = timeline.events[-1] if timeline.events else None
    return last["step"] if last is not None and last["kind"] == EXHAUSTED else None


def lost_seconds(timeline: Timeline) -> dict[int, float]:
    """Seconds of attempts that did not count, by step."""
    lost: dict[int, float] = {}
    for event in timeline.events:
        seconds = event.get("lost_seconds")
        if event["kind"] == RECOVERY and is_number(seconds):
            lost[event["step"]] = lost.get(event["step"], 0.0) + seconds
    return lost


def lost_share(timeline: Timeline) -> float | None:
    """Share of the training time that was lost; None where the record lacks a step or its seconds."""
    seconds, lost = _step_seconds(timeline), lost_seconds(timeline)
    if not seconds or (recoveries(timeline) and not lost) or not lost.keys() <= seconds.keys():
        return None
    return sum(lost.values()) / sum(seconds.values())


def _step_seconds(timeline: Timeline) -> dict[int, float]:
    """The seconds that each step took."""
    figures = zip(*timeline.series("target_tokens", "target_tokens_per_second"), strict=True)
    return {step: tokens / rate for step, tokens, rate in figures if tokens > 0 and rate > 0}
