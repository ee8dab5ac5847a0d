"""What the record of a run says of its limits, of the time that was lost, and of its speed: numbers, for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeGuard

from torchtune_adaptive.limits.change import GROWTH, RECOVERY, THRASHING, TRIAL
from torchtune_adaptive.record.events import EPOCH
from torchtune_adaptive.record.timeline import Record, Timeline, is_number

CHANGES = (EPOCH, RECOVERY, THRASHING, TRIAL, GROWTH)
TRAINED = "policy"
"""The stage of which records from before each stage had its own tell when an epoch begins: the only one that did so was
that of preference training."""
AFTER = 0.5
"""What happened after a step stands between that one and the next; what happened within it, at its number."""
WINDOWS_IN_A_RUN = 8
SHORTEST_WINDOW = 11


class Mark(NamedTuple):
    kind: str
    at: float
    size: float
    """The limit that did not fit, or that was tried."""


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
        course.marks.append(Mark(kind, at, float(after) if kind == GROWTH or known_before is None else known_before))


def recoveries(timeline: Timeline) -> int:
    return sum(event["kind"] == RECOVERY for event in timeline.events)


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
    seconds = dict(zip(*_step_seconds(timeline)[:2], strict=True))
    lost = lost_seconds(timeline)
    if not seconds or (recoveries(timeline) and not lost) or not lost.keys() <= seconds.keys():
        return None
    return sum(lost.values()) / sum(seconds.values())


class Speed(NamedTuple):
    steps: Sequence[int]
    tokens_per_second: Sequence[float]
    without_losses: Sequence[float]
    """Tokens per second, had no attempt been lost."""
    window: int
    """The steps over which each is the mean."""


def speed(timeline: Timeline) -> Speed | None:
    """Tokens over seconds of so many steps: those of a step alone mostly tell how long its samples were."""
    steps, seconds, tokens = _step_seconds(timeline)
    if not steps:
        return None
    window = max(SHORTEST_WINDOW, len(steps) // WINDOWS_IN_A_RUN) | 1
    lost = lost_seconds(timeline)
    kept = [max(0.0, took - lost.get(step, 0.0)) for step, took in zip(steps, seconds, strict=True)]
    return Speed(steps, _rates(tokens, seconds, window), _rates(tokens, kept, window), min(window, len(steps)))


def _step_seconds(timeline: Timeline) -> tuple[list[int], list[float], list[float]]:
    """Steps, the seconds that each took, and its tokens."""
    steps, tokens, rates = timeline.series("target_tokens", "target_tokens_per_second")
    known = [each for each in zip(steps, tokens, rates, strict=True) if each[1] > 0 and each[2] > 0]
    return [each[0] for each in known], [each[1] / each[2] for each in known], [float(each[1]) for each in known]


def _rates(tokens: Sequence[float], seconds: Sequence[float], window: int) -> list[float]:
    half = window // 2
    spans = [slice(max(0, at - half), at + half + 1) for at in range(len(tokens))]
    return [sum(tokens[span]) / max(1e-9, sum(seconds[span])) for span in spans]
