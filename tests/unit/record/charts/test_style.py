"""Where names stand beside the lines of a picture."""

from __future__ import annotations

import pytest

from torchtune_adaptive.record.charts.style import spread


@pytest.mark.parametrize(
    ("heights", "written"),
    [
        ([0.9, 0.5, 0.1], [0.9, 0.5, 0.1]),
        ([0.52, 0.48], [0.55, 0.45]),
        ([0.5, 0.5, 0.5, 0.1], [0.6, 0.5, 0.4, 0.1]),
        ([0.55, 0.5, 0.36], [0.575, 0.475, 0.36]),
        ([1.0, 0.98], [1.0, 0.9]),
        ([1.2, 1.2, 0.2], [1.0, 0.9, 0.2]),
        ([], []),
    ],
)
def test_names_stay_near_their_lines_and_apart(heights: list[float], written: list[float]) -> None:
    assert spread(heights, apart=0.1) == pytest.approx(written)
