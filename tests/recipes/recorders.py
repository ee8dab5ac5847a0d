"""Components named in test configs that record a run."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.timeline import read_timeline


class JsonLogger:
    """A metric logger that writes every figure in full precision, one line per step."""

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close(), as loggers are

    def log_config(self, config: DictConfig) -> None:
        pass

    def log(self, name: str, data: Any, step: int) -> None:
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        figures = {name: float(value) for name, value in payload.items()}
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_log(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def assert_same_figures(
    ours: Sequence[Mapping[str, float]],
    theirs: Sequence[Mapping[str, float]],
    figures: Iterable[str],
    *,
    rel: float = 0.0,
    abs: float = 0.0,
) -> None:
    """Compare the logs of two runs, step by step."""
    for mine, its in zip(ours, theirs, strict=True):
        for figure in figures:
            assert mine[figure] == pytest.approx(its[figure], rel=rel, abs=abs), (mine.get("step"), figure)


def search_results(output_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the result of each stage's last search."""
    events = read_timeline(output_dir).events
    return {event.get("stage", ""): event["result"] for event in events if event["kind"] == "search"}
