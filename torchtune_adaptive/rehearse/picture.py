"""A rehearsal's picture: what each step takes of the card. It needs matplotlib, which is optional."""

from __future__ import annotations

import textwrap
from pathlib import Path

from torchtune_adaptive.rehearse.rehearsed import GIB, Rehearsed

# Okabe and Ito's colours, which can be told apart with any colour vision
_BLUE, _SKY, _RED, _INK = "#0072B2", "#56B4E9", "#D55E00", "#333333"


def draw(found: Rehearsed, path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(textwrap.fill(found.verdict(), 80), loc="left", fontsize=11)
    card = found.usable_bytes / GIB
    error = None if found.fits else found.unfinished
    drawn = [*found.steps, *([] if error is None else [error])]
    steps, reserved, allocated = (
        [each[name] / per for each in drawn]
        for name, per in (("step", 1), ("reserved_bytes", GIB), ("allocated_bytes", GIB))
    )
    axes.bar(steps, reserved, width=0.9, color=_SKY, label="reserved")
    axes.bar(steps, allocated, width=0.9, color=_BLUE, label="of it, allocated")
    if error is not None:
        axes.bar(error["step"], error["asked_bytes"] / GIB, bottom=error["reserved_bytes"] / GIB, width=0.9,
                 color=_RED, label="requested, and refused")  # fmt: skip
    axes.axhline(card, color=_INK, lw=1.5, label="usable memory")
    flushing = [each["step"] for each in found.steps if each["flushes"]]
    if flushing:
        axes.plot(flushing, [card] * len(flushing), "v", color=_RED, ms=7, clip_on=False, label="cache flushed")
    axes.set(xlabel="step", ylabel="GiB", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # by default two, of one step its fractions
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
