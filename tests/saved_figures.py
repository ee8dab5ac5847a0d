"""Read saved figures from matplotlib's objects."""

from pathlib import Path

import pytest


def is_drawn(path: Path) -> bool:
    """Return True if the file is an image with visible content."""
    pixels = pytest.importorskip("matplotlib.image").imread(path)
    height, width = pixels.shape[:2]
    inked = float((pixels[..., :3].min(axis=2) < 0.9).mean())
    return width > 1000 and height > 300 and 0.005 < inked < 0.5
