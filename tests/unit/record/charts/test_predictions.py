"""The picture of a plan: what it can be saved as, and that no name lies over a curve."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.prediction.capacity import Capacity
from torchtune_adaptive.record.charts.predictions import check_drawable, draw_frontier, sharing
from torchtune_adaptive.record.charts.style import LineName, new_figure


def frontier(most: list[int], with_retries: list[int]) -> list[Capacity]:
    """Of rows twice as long each time."""
    capacities: list[Any] = [
        SimpleNamespace(tokens=256 << index, most_rows=rows, most_rows_with_retries=retried)
        for index, (rows, retried) in enumerate(zip(most, with_retries, strict=True))
    ]
    return cast("list[Capacity]", capacities)


@pytest.mark.parametrize(
    ("most", "with_retries"),
    [
        ([200, 100, 50, 25, 12, 6, 3], [260, 130, 65, 32, 16, 8, 4]),
        ([1, 1, 1], [2, 2, 1]),
        ([9, 1], [90, 1]),
        ([3], [5]),
    ],
)
def test_names_of_lines_lie_over_none(most: list[int], with_retries: list[int]) -> None:
    figure = new_figure(Path("plan.png"), 11, 4.2)
    assert figure is not None
    _, axes = figure.subplots(1, 2, width_ratios=(3, 2))
    draw_frontier(axes, frontier(most, with_retries))
    figure.draw_without_rendering()
    assert axes.get_legend() is None
    assert [text.get_text() for text in axes.texts] == ["without allocator retries", "at all"]
    for text in axes.texts:
        box = text.get_window_extent()
        assert axes.bbox.containsx(box.x0)
        assert axes.bbox.containsy(box.y0)
        assert axes.bbox.containsy(box.y1)
        for line in axes.lines:
            path = line.get_path().transformed(line.get_transform())
            assert not path.intersects_bbox(box, filled=False)


def test_lines_that_are_one_need_no_names() -> None:
    figure = new_figure(Path("plan.png"), 4, 4)
    assert figure is not None
    axes = figure.subplots()
    draw_frontier(axes, frontier([8, 4], [8, 4]))
    assert (len(axes.lines), len(axes.texts)) == (1, 0)


@pytest.mark.parametrize(
    "name", ["plan.xyz", "/proc/none/plan.png", "/proc/plan.png", "folder", "plan.png/plan.png", "pipe"]
)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "plan.png").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=f"picture is '.*{name}'"):
        check_drawable(tmp_path / name, "picture")


@pytest.mark.parametrize("name", ["plan.png", "plan.SVG", "new/folder/plan.pdf", "plan"])
def test_what_can_be_saved_is_not(tmp_path: Path, name: str) -> None:
    check_drawable(tmp_path / name, "picture")
    assert list(tmp_path.iterdir()) == [], "a question leaves nothing behind"


def test_lines_of_which_one_hides_the_other_share_a_name() -> None:
    names = [LineName("update", 1.0, "grey"), LineName("head forward", 9.0, "green"), LineName("loss", 8.99, "red")]
    assert sharing(names, apart=0.1) == [LineName("head forward, loss", 8.99, "red"), names[0]]
    assert sharing(names, apart=0.001) == [names[1], names[2], names[0]]
