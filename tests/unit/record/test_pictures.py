"""Pictures show what was measured, where it was measured, and say in which unit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pictures import cut_off, is_drawn, legend_of, line_of, marked, pictures
from tests.unit.record.test_tables import GIB, example, failing, profiled
from torchtune_adaptive.limits.change import GROWTH, RECOVERY
from torchtune_adaptive.record.charts.run import draw_run
from torchtune_adaptive.record.charts.searches import draw_profile, draw_search
from torchtune_adaptive.record.events import START, Event
from torchtune_adaptive.record.journal import Journal
from torchtune_adaptive.record.timeline import read_timeline
from torchtune_adaptive.search.rows import SearchResult


@pytest.mark.parametrize("result", [example(), failing()], ids=["linear", "failures"])
def test_every_probe_of_a_search_is_a_point_at_its_rows_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: SearchResult
) -> None:
    drawn = pictures(monkeypatch)
    draw_search(tmp_path, result, 4096)
    (axes,) = drawn[0].axes
    complete = [probe for probe in result.probes if probe.peak.fits and probe.rows <= 3 * result.fits_rows]
    measured = {(probe.rows, peak / GIB) for probe in complete for peak in probe.peak.phase_bytes.values()}
    assert measured <= set(marked(axes, "o"))
    chosen = next(probe for probe in result.probes if probe.rows == result.rows)
    assert set(marked(axes, "o")) - measured <= {(result.rows, (chosen.peak.peak_bytes or 0) / GIB)}
    assert axes.get_ylabel() == "peak memory of a rank (GiB)"
    assert axes.get_xlabel().startswith("rows in a microbatch")
    assert cut_off(drawn[0]) == []


def test_the_budget_of_a_search_is_a_line_across_and_what_did_not_fit_a_cross(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = pictures(monkeypatch)
    draw_search(tmp_path, failing(), 4096)
    (axes,) = drawn[0].axes
    across, heights = line_of(axes, "budget, 11.5 GiB")
    assert (across, heights) == ([0, 1], [11.5, 11.5])  # from edge to edge of the axes
    assert marked(axes, "x") == [(8.0, 8.0)]  # within the budget, but with allocator retries; 16 is beyond the edge
    assert legend_of(axes) == ["step", "update", "budget, 11.5 GiB", "did not fit"]


def test_the_line_of_a_phase_leads_through_its_points_to_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, result = pictures(monkeypatch), example()
    draw_search(tmp_path, result, 4096)
    lines = [line for line in drawn[0].axes[0].lines if len(line.get_xdata()) == 2 and line.get_linestyle() == "-"]
    (law,) = [line for line in lines if line.get_xdata()[1] > 1]
    (start, end), (fixed, full) = law.get_data()
    assert (start, fixed) == (0, pytest.approx(result.lines["backward"].fixed_bytes / GIB))
    assert (end, full) == (pytest.approx(result.fits_rows), pytest.approx(75.2))


def test_every_point_of_a_profile_stands_at_its_tokens_and_hollow_if_it_was_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, result = pictures(monkeypatch), profiled()
    path = draw_profile(tmp_path, result)
    assert path is not None
    (axes,) = drawn[0].axes
    measured = {(p.rows * p.length, (p.peak.peak_bytes or 0) / GIB) for p in result.points}
    hollow = {(p.rows * p.length, (p.peak.peak_bytes or 0) / GIB) for p in result.points if p.held_out}
    points = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
    assert {(line.get_xdata()[0], line.get_ydata()[0]) for line in points} == measured
    white = [line for line in points if line.get_markerfacecolor() == "white"]
    assert {(line.get_xdata()[0], line.get_ydata()[0]) for line in white} == hollow
    assert len(hollow) == 2
    assert line_of(axes, "budget")[1] == [6.0, 6.0]
    assert line_of(axes, "fits at any length")[0] == [result.constant_tokens] * 2
    assert {f"{point.length} tokens a row" for point in result.points} <= set(legend_of(axes))
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("padded tokens in a microbatch", "peak memory of a rank (GiB)")
    assert cut_off(drawn[0]) == []


def test_a_text_beyond_the_edge_is_noticed() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    figure.text(0.5, 0.5, "inside")
    figure.text(1.2, 0.5, "outside")
    assert cut_off(figure) == ["outside"]


def test_an_empty_picture_is_no_picture(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(8, 4))
    figure.savefig(tmp_path / "empty.png", dpi=200)
    assert not is_drawn(tmp_path / "empty.png")
    draw_search(tmp_path, example(), 4096)
    assert is_drawn(tmp_path / "batch_search.png")


def a_run(directory: Path) -> None:
    """Thirty steps: out of memory at the tenth, grown back at the 25th."""
    journal = Journal(directory)
    journal.start(Event(kind=START, step=0, reason=""))
    for step in range(1, 31):
        rows = 4 if 10 <= step < 25 else 8
        journal.step(
            step,
            {
                "samples": 16,
                "microbatch_rows": rows,
                "target_tokens_per_second": 1000.0 + step,
                "peak_bytes": step * 2**25,
                "budget_bytes": GIB,
            },
        )
    journal.event(Event(kind=RECOVERY, step=10, reason="", before=8, after=4, unit="rows"))
    journal.event(Event(kind=GROWTH, step=25, reason="", before=4, after=8, unit="rows"))


def test_the_panels_of_a_run_show_its_rows_its_memory_and_its_speed_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = pictures(monkeypatch)
    a_run(tmp_path)
    draw_run(tmp_path, read_timeline(tmp_path))
    sizes, memory, speed = drawn[0].axes
    steps = list(range(1, 31))
    assert line_of(sizes, "rows of the largest microbatch") == (
        steps,
        [4 if 10 <= step < 25 else 8 for step in steps],
    )
    assert line_of(sizes, "samples of a step") == (steps, [16] * 30)
    assert line_of(memory, "peak of the fullest rank") == (steps, [pytest.approx(step / 32) for step in steps])
    assert line_of(memory, "its budget") == (steps, [1.0] * 30)
    assert line_of(speed, "all ranks, median of 11 steps")[1][9:12] == [1010.0, 1011.0, 1012.0]
    assert [axes.get_ylabel() for axes in drawn[0].axes] == ["batch size", "memory (GiB)", "target tokens / s"]
    assert speed.get_xlabel() == "step"
    assert cut_off(drawn[0]) == []


def test_what_happened_in_a_run_is_marked_at_its_step_and_counted_in_the_legend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = pictures(monkeypatch)
    a_run(tmp_path)
    draw_run(tmp_path, read_timeline(tmp_path))
    (first, *_), (legend,) = drawn[0].axes, drawn[0].legends
    assert [step for step, _ in marked(first, "v")] == [10]
    assert [step for step, _ in marked(first, "^")] == [25]
    assert [text.get_text() for text in legend.get_texts()] == [
        "out of memory, step repeated (1)",
        "grown back, on probation (1)",
    ]
