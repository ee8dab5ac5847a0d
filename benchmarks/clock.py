"""Measure the wall time and CPU time of every step of a recipe.

This is a separate module, because a class of a benchmark's main module would be a different class in each rank.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple


class Moment(NamedTuple):
    wall_s: float
    cpu_s: float
    """CPU time of all threads of this process, which other work on the machine hardly changes."""


class Clock:
    """Metric logger that stores the time of every step."""

    times: list[Moment] = []  # noqa: RUF012 - the recipes build their loggers themselves and share it

    def __init__(self, path: str) -> None:
        pass

    def log_config(self, config: Any) -> None:
        pass

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        self.times.append(Moment(time.perf_counter(), time.process_time()))

    def close(self) -> None:
        pass
