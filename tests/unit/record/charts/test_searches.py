"""The picture of a search shows what was measured, where it was measured, and says what was chosen and what fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.laws import refuse_nothing
from tests.pictures import cut_off, is_drawn, line_of, marked, names_of, overlapping, pictures
from tests.unit.record.test_tables import GIB, example, failing, profiled
from torchtune_adaptive.memory.peak import Peak
from torchtune_adaptive.record.charts.searches import binding_phases, draw_profile, draw_search
from torchtune_adaptive.record.charts.style import BLUE
from torchtune_adaptive.search.probe_result import Room
from torchtune_adaptive.search.rows import SearchResult, search


def blue_dots(axes: Any) -> list[Any]:
    return [line for line in axes.lines if line.get_marker() == "o" and line.get_color() == BLUE]


@pytest.mark.parametrize("result", [example(), failing()], ids=["linear", "failures"])
def test_every_probe_of_a_search_is_a_point_at_its_rows_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: SearchResult
) -> None:
    drawn = pictures(monkeypatch)
    draw_search(tmp_path, result, 4096)
    (axes,) = drawn[0].axes
    complete = [probe for probe in result.probes if probe.peak.fits and probe.rows <= 3 * result.fits_rows]
    measured = {(probe.rows, peak / GIB) for probe in complete for peak in probe.peak.phase_bytes.values()}
    most = {(probe.rows, (probe.peak.peak_bytes or 0) / GIB) for probe in complete}
    assert {(line.get_xdata()[0], line.get_ydata()[0]) for line in blue_dots(axes)} == most
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
    across, heights = line_of(axes, "budget")
    assert (across, heights) == ([0, 1], [11.5, 11.5])  # from edge to edge of the axes
    assert marked(axes, "x") == [(8.0, 8.0)]  # within the budget, but with allocator retries; 16 is beyond the edge
    assert names_of(axes) == ["budget, 11.5 GiB", "other phases"]
    assert [text.get_text() for text in axes.texts if text.get_gid() == "phase"] == ["step"]
    assert axes.get_title(loc="left") == "4 rows of 4096 tokens chosen (8 did not fit)"
    assert "did not fit" in [text.get_text() for text in axes.texts]


def test_the_line_of_a_phase_leads_through_its_points_to_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, result = pictures(monkeypatch), example()
    draw_search(tmp_path, result, 4096)
    (start, end), (fixed, full) = line_of(drawn[0].axes[0], "needed")
    assert (start, fixed) == (0, pytest.approx(result.lines["backward"].fixed_bytes / GIB))
    assert (end, full) == (pytest.approx(result.fits_rows), pytest.approx(75.2))


def test_the_line_of_a_search_turns_where_another_phase_needs_more_and_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one name for each phase at the right, where all of them end at the budget."""
    needs = {"layers backward": (4, 1), "head forward": (0, 2), "loss": (0, 1.9), "update": (3, 0)}

    def measure(rows: int) -> Peak:
        return Peak({name: int((fixed + rows * row) * GIB) for name, (fixed, row) in needs.items()}, fits=True)

    drawn, result = pictures(monkeypatch), search(measure, Room(21 * GIB), refuse=refuse_nothing)
    assert binding_phases(result.lines, 10) == [("layers backward", 0, 4), ("head forward", 4, 10)]
    draw_search(tmp_path, result, 4096)
    (axes,) = drawn[0].axes
    x, y = line_of(axes, "needed")
    assert (x, y) == ([0, pytest.approx(4), pytest.approx(10.5)], [4, pytest.approx(8), pytest.approx(21)])
    assert [text.get_text() for text in axes.texts if text.get_gid() == "phase"] == ["layers backward", "head forward"]
    assert names_of(axes) == ["budget, 21.0 GiB", "other phases"]
    assert overlapping(drawn[0]) == []
    assert cut_off(drawn[0]) == []


@pytest.mark.parametrize(
    ("most_rows", "samples", "said"),
    [
        (64, 64, "2 rows of 256 tokens chosen (3.9 fit, rounded down to a power of two)"),
        (2, 2, "2 rows of 256 tokens chosen (all 2 samples of a step)"),
        (1, 8, "1 row of 256 tokens chosen (at most 1 are searched)"),
    ],
)
def test_a_title_says_what_was_chosen_and_what_fits_which_are_not_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_rows: int, samples: int, said: str
) -> None:
    def measure(rows: int) -> Peak:
        return Peak({"step": int(rows * GIB / 3.95)}, fits=True)

    sizes = {"max_rows": most_rows, "samples_per_step": samples}
    result = search(measure, Room(GIB), refuse=refuse_nothing, **sizes)
    (tmp_path / "batch_search.json").write_text(json.dumps(result.to_json()))
    written = SearchResult.from_json(json.loads((tmp_path / "batch_search.json").read_text()))
    drawn = pictures(monkeypatch)
    draw_search(tmp_path, written, 256)
    draw_search(tmp_path, written, 256, "policy", "pair")
    rows, pairs = (figure.axes[0] for figure in drawn)
    assert rows.get_title(loc="left") == said
    assert pairs.get_title(loc="left") == "policy: " + said.replace("row", "pair", 1)
    assert pairs.get_xlabel().startswith("pairs in a microbatch")
    assert overlapping(drawn[0]) == []


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
    assert line_of(axes, "fits at any length") == ([result.constant_tokens], [6.0])
    assert {f"rows of {point.length} tokens" for point in result.points} < set(names_of(axes))
    assert axes.get_title(loc="left") == f"samples of any length fit, up to {result.constant_tokens} tokens in all"
    assert axes.get_ylabel() == "peak memory of a rank (GiB)"
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


@pytest.mark.parametrize("stage", ["", "policy"])
def test_the_picture_of_a_search_names_its_stage_where_there_are_several(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, named = pictures(monkeypatch), "policy: " * bool(stage)
    draw_search(tmp_path, example(), 4096, stage)
    draw_profile(tmp_path, profiled(), stage)
    rows, lengths = (figure.axes[0].get_title(loc="left") for figure in drawn)
    assert rows.startswith(f"{named}{example().rows} rows of 4096 tokens chosen (")
    assert lengths.startswith(f"{named}samples of any length fit, up to ")
