"""Read saved figures from matplotlib's objects."""

from pathlib import Path
from typing import Any

import pytest


def pictures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the figures saved from here on; their files are written too."""
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    drawn: list[Any] = []
    save = figure_class.savefig

    def keep(figure: Any, *args: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(figure_class, "savefig", keep)
    return drawn


def marked(axes: Any, marker: str) -> list[tuple[float, float]]:
    """Return the points drawn with this marker, from left to right."""
    lines = [line for line in axes.lines if line.get_marker() == marker]
    return sorted((float(x), float(y)) for line in lines for x, y in zip(*line.get_data(), strict=True))


def line_of(axes: Any, label: str) -> tuple[list[float], list[float]]:
    """Return the data of the one line whose label starts with `label`."""
    (line,) = (line for line in axes.lines if str(line.get_label()).startswith(label))
    x, y = line.get_data()
    return list(x), list(y)


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def is_drawn(path: Path) -> bool:
    """Return True if the file is an image with visible content."""
    pixels = pytest.importorskip("matplotlib.image").imread(path)
    height, width = pixels.shape[:2]
    inked = float((pixels[..., :3].min(axis=2) < 0.9).mean())
    return width > 1000 and height > 300 and 0.005 < inked < 0.5
