"""The picture of settings by memory and speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pictures import cut_off, is_drawn, pictures
from torchtune_adaptive.prediction.outcome import Outcome
from torchtune_adaptive.prediction.roofline import Seconds
from torchtune_adaptive.record.charts.outcomes import draw_speeds

GIB = 2**30
LONG = "enable_activation_checkpointing=False ac_mode=selective ac_option=2 compile=True"


def outcome(name: str, gib: float, seconds: float, rows: int = 4) -> Outcome:
    return Outcome(
        name, 8, 4096, rows, int(gib * GIB), int(gib * GIB), Seconds(seconds, 0.8 * seconds, 2 * seconds), 1.0
    )


def test_each_setting_is_a_point_with_its_number_and_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = pictures(monkeypatch)
    outcomes = [
        outcome("compile=True", 60, 1.0),
        outcome(LONG, 45, 1.1),
        outcome("", 62, 1.3),
        outcome("optimizer._component_=torchao.optim.AdamW8bit ~optimizer.fused", 40, 1.4),
        outcome("enable_activation_checkpointing=False", 90, 0.9, rows=0),
    ]
    names = [each.name or "as it is" for each in outcomes]
    assert draw_speeds(tmp_path / "speeds.png", outcomes, names, 70 * GIB, "llama3_1_8b · full · 8 ranks")
    assert is_drawn(tmp_path / "speeds.png")
    points, beside = drawn[0].axes
    assert [text.get_text() for text in points.texts] == ["1", "2", "3", "4", "5", "70.0 GiB usable "]
    assert points.get_title(loc="left") == "number 1 is the fastest that fits; grey: another is as fast in less memory"
    listed = [text.get_text().replace("\n    ", " ") for text in beside.texts]
    assert listed == [f"{number}  {name}" for number, name in enumerate(names, start=1)]
    crosses = [line for line in points.lines if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[90]]
    frontier = points.lines[0]
    assert list(frontier.get_xdata()) == [40, 45, 60]
    assert cut_off(drawn[0]) == []
