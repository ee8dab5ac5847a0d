"""Measure the wall time and CPU time of every step of a recipe.

This is a separate module, because a class of a benchmark's main module would be a different class in each rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
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


class FirstStep:
    """Metric logger that writes the CPU time of this process when the first step is logged, and ends the process.

    It imports neither this package nor tests, because processes of torchtune's recipes use it too.
    """

    def __init__(self, path: str) -> None:
        from torchtune import training

        # Replace functions with which torchtune's recipe fails without an accelerator.
        training.get_memory_stats = lambda *_, **__: {}
        training.cleanup_before_training = training.log_memory_stats = lambda *_, **__: None
        self._path = Path(path)

    def log_config(self, config: Any) -> None:
        pass

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        self._path.write_text(str(time.process_time()))
        os._exit(0)

    def close(self) -> None:
        pass
