"""Reads the record of a run."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from torchtune_adaptive.loop.metrics import EPOCH, EVENTS_FILE, START, STEPS_FILE


class Timeline(NamedTuple):
    """The steps and events of a run in order, each once, even if the run has resumed."""

    steps: list[dict[str, Any]]
    events: list[dict[str, Any]]


def read_timeline(directory: Path) -> Timeline:
    steps: list[dict[str, Any]] = []
    for line in lines_of(directory / STEPS_FILE):
        starts = line.get("kind") == START
        # The order of lines decides, not the time: a repeated step removes its earlier line and those of later steps.
        while steps and steps[-1]["step"] > line["step"] - (not starts):
            steps.pop()
        steps += [] if starts else [line]
    events: list[dict[str, Any]] = []
    for line in lines_of(directory / EVENTS_FILE):
        if line["kind"] == START:
            events = [event for event in events if remains_valid(event, line["step"])]
        events.append(line)
    return Timeline(steps, events)


def remains_valid(event: dict[str, Any], steps_done: int) -> bool:
    """Return True if an event is still part of the run when training starts after `steps_done` steps."""
    if event["kind"] == EPOCH:  # recorded again when the epoch restarts
        return bool(event["step"] < steps_done)
    return 0 < event["step"] <= steps_done


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file. A crash may have cut one."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
