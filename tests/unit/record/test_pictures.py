"""Pictures show what was measured, where it was measured, and say in which unit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import cut_off, is_drawn, line_of, marked, names_of, pictures
from tests.unit.record.test_tables import GIB, example, failing, profiled
from torchtune_adaptive.limits.change import GROWTH, RECOVERY
from torchtune_adaptive.record.charts.panels import draw_imbalance, legible
from torchtune_adaptive.record.charts.run import draw_run, panels_of, title
from torchtune_adaptive.record.charts.searches import draw_profile, draw_search
from torchtune_adaptive.record.events import EPOCH, EVENTS_FILE, SCHEDULE, START, Event
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
    across, heights = line_of(axes, "budget")
    assert (across, heights) == ([0, 1], [11.5, 11.5])  # from edge to edge of the axes
    assert marked(axes, "x") == [(8.0, 8.0)]  # within the budget, but with allocator retries; 16 is beyond the edge
    assert names_of(axes) == ["budget, 11.5 GiB", "step", "update"]
    assert axes.get_title(loc="left") == "4 rows of 4096 tokens fit (peak: step)"
    assert "did not fit" in [text.get_text() for text in axes.texts]


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


EARLIER_STAGES = Path(__file__).parent / "earlier" / "stages"
EARLIER_SIZES = [1, 2, 1, 1, 1]
STEPS = 30
SECONDS = {10: 3.0, 15: 2.0}
"""Those of steps that were run again; all others take one."""


def a_run(directory: Path) -> None:
    """Thirty steps of 16 samples: out of memory at the tenth, grown after the 14th, and out of memory at once."""
    journal = Journal(directory)
    journal.start(Event(kind=START, step=0, reason=""))
    journal.event(Event(kind=EPOCH, step=0, reason="", after=8, unit="rows"))
    for step in range(1, STEPS + 1):
        memory = {"peak_bytes": step * 2**25, "budget_bytes": GIB}
        speed = {"target_tokens": 600, "target_tokens_per_second": 600 / SECONDS.get(step, 1.0)}
        journal.step(step, {"samples": 16, "microbatch_rows": 4, **speed, **memory})
    journal.event(Event(kind=RECOVERY, step=10, reason="", before=8, after=4, unit="rows", lost_seconds=2.0))
    journal.event(Event(kind=GROWTH, step=14, reason="", before=4, after=8, unit="rows"))
    journal.event(Event(kind=RECOVERY, step=15, reason="", before=8, after=4, unit="rows", lost_seconds=1.0))


def drawn_run(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    drawn = pictures(monkeypatch)
    assert draw_run(directory, read_timeline(directory)) is not None
    return drawn[0]


def test_the_limit_of_a_run_is_a_line_of_steps_with_marks_where_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path)
    limit, *_ = drawn_run(tmp_path, monkeypatch).axes
    assert line_of(limit, "limit") == ([0.5, 10, 14.5, 15, 30.5], [8, 4, 8, 4, 4])
    assert marked(limit, "v") == [(10, 8), (15, 8)]
    assert marked(limit, "^") == [(14.5, 8)]
    assert [text.get_text() for text in limit.texts] == [
        "out of memory: step repeated in smaller microbatches (2)",
        "no trouble for a while: larger microbatches tried again (1)",
    ]
    (shade,) = limit.collections
    assert {tuple(corner) for corner in shade.get_paths()[0].vertices} >= {(10, 4), (10, 8), (30.5, 4), (30.5, 8)}
    assert all(len(set(line.get_xdata())) > 1 or line.get_marker() != "None" for line in limit.lines), "no full height"


def test_memory_and_speed_are_those_of_the_record_beside_what_they_could_have_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path)
    figure = drawn_run(tmp_path, monkeypatch)
    _, memory, speed = figure.axes
    steps = list(range(1, STEPS + 1))
    assert line_of(memory, "peak") == (steps, [pytest.approx(step / 32) for step in steps])
    assert line_of(memory, "budget") == (steps, [1.0] * STEPS)
    assert [text.get_text() for text in memory.texts] == ["its budget, 1 GiB"]
    # eleven steps of 600 tokens each: those around the tenth took two seconds more, and one more for the fifteenth
    assert line_of(speed, "tokens")[1][9] == pytest.approx(11 * 600 / 14)
    assert line_of(speed, "without losses")[1] == pytest.approx([600.0] * STEPS)
    assert speed.get_xlabel() == "step"
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "most rows in a microbatch",
        "peak memory of the fullest rank (GiB)",
        "target tokens a second, all ranks, mean of 11 steps",
    ]
    assert all(axes.get_legend() is None for axes in figure.axes)
    assert cut_off(figure) == []


def test_the_title_of_a_run_says_what_happened(tmp_path: Path) -> None:
    a_run(tmp_path)
    assert title(read_timeline(tmp_path)) == "30 steps, 2 out-of-memory errors survived, 9 % of the time lost"
    journal = Journal(tmp_path)
    journal.event(Event(kind=RECOVERY, step=20, reason="", before=8, after=4, unit="rows"))
    journal.step(40, {})
    assert title(read_timeline(tmp_path)).startswith("31 logged steps, 3 out-of-memory errors survived")
    journal.start(Event(kind=START, step=0, reason="another run"))
    journal.step(1, {})
    assert title(read_timeline(tmp_path)) == "1 step, none out of memory"


def a_run_of_ranks(directory: Path, *imbalances: float) -> None:
    journal = Journal(directory)
    for step, imbalance in enumerate(imbalances, 1):
        journal.step(step, {"samples": 16, "rank_imbalance": imbalance})


def test_ranks_that_wait_for_the_fullest_have_a_panel_that_says_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run_of_ranks(tmp_path, 1.0, 1.3, 1.2)
    figure = drawn_run(tmp_path, monkeypatch)
    (panel,) = figure.axes
    assert panel.get_title(loc="left") == "work of the fullest rank over the mean of the ranks: on average 17 % more"
    assert line_of(panel, "fullest") == ([1, 2, 3], [pytest.approx(percent) for percent in (0, 30, 20)])
    assert [panel.yaxis.get_major_formatter()(value) for value in (0, 2.5, 20)] == ["0 %", "2.5 %", "20 %"]
    assert cut_off(figure) == []


@pytest.mark.parametrize("record", [a_run, lambda directory: a_run_of_ranks(directory, 1.0, 1.0)], ids=["old", "one"])
def test_nothing_is_said_of_ranks_where_there_is_one_or_the_record_does_not_tell(
    tmp_path: Path, record: Callable[[Path], None]
) -> None:
    record(tmp_path)
    panels = panels_of(read_timeline(tmp_path))
    assert not [draw for draw, _ in panels if getattr(draw, "func", None) is draw_imbalance]


def test_a_share_is_not_told_where_the_record_does_not_have_the_seconds(tmp_path: Path) -> None:
    """A record from before they were in it, or one in which the step was not logged."""
    a_run(tmp_path)
    lines = (tmp_path / EVENTS_FILE).read_text().splitlines()
    (tmp_path / EVENTS_FILE).write_text("\n".join(line.replace("lost_seconds", "_") for line in lines) + "\n")
    assert title(read_timeline(tmp_path)) == "30 steps, 2 out-of-memory errors survived"
    Journal(tmp_path).event(Event(kind=RECOVERY, step=99, reason="", unit="rows", after=2, lost_seconds=1.0))
    assert title(read_timeline(tmp_path)).endswith("survived")


def test_each_stage_has_a_panel_and_a_limit_of_bytes_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    for stage, before in (("policy", 4 * GIB), ("value", 2 * GIB)):
        change = {"stage": stage, "before": before, "after": before // 2, "unit": "bytes"}
        journal.event(Event(kind=RECOVERY, step=2, reason="", **change))
    journal.step(1, {})
    journal.step(3, {})
    figure = drawn_run(tmp_path, monkeypatch)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "most GiB in a microbatch, stage policy",
        "most GiB in a microbatch, stage value",
    ]
    assert line_of(figure.axes[0], "limit") == ([0.5, 2, 3.5], [4, 2, 2])


def of_a_stage(kind: str, step: int, stage: str, after: int, before: int | None = None) -> Event:
    return Event(kind=kind, step=step, stage=stage, before=before, after=after, unit="rows", reason="")


def test_a_stage_that_never_fails_has_a_panel_and_each_has_one_from_the_first_step_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs of two stages, whose batch grows from 2 to 4 rows; one runs out of memory in the second epoch."""
    journal = Journal(tmp_path)
    journal.start(Event(kind=START, step=0, reason=""))
    for step, after in ((0, 2), (2, 4)):
        journal.event(of_a_stage(EPOCH, step, "reference", 8))
        journal.event(of_a_stage(EPOCH, step, "policy", after))
    journal.event(of_a_stage(RECOVERY, 4, "policy", 3, before=4))
    for step in range(1, 5):
        journal.step(step, {})
    figure = drawn_run(tmp_path, monkeypatch)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "most rows in a microbatch, stage reference",
        "most rows in a microbatch, stage policy",
    ]
    reference, policy = figure.axes
    assert line_of(reference, "limit") == ([0.5, 2.5, 4.5], [8, 8, 8])
    assert line_of(policy, "limit") == ([0.5, 2.5, 4, 4.5], [2, 4, 3, 3])
    assert cut_off(figure) == []


def test_what_a_stage_went_through_before_the_first_step_is_in_no_panel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference that is asked once for all pairs, and runs out of memory there."""
    journal = Journal(tmp_path)
    journal.event(of_a_stage(RECOVERY, 0, "reference", 4, before=8))
    journal.event(of_a_stage(EPOCH, 0, "policy", 2))
    journal.step(1, {})
    figure = drawn_run(tmp_path, monkeypatch)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["most rows in a microbatch, stage policy"]


def test_an_epoch_of_an_earlier_record_which_names_no_stage_is_that_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`earlier/stages` is by commit 11eb75a2: preference training in 36 MiB, with a batch that doubles every epoch."""
    for file in EARLIER_STAGES.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    limit, *others = drawn_run(tmp_path, monkeypatch).axes
    assert limit.get_title(loc="left") == "most rows in a microbatch, stage policy"
    assert line_of(limit, "limit")[1] == EARLIER_SIZES
    assert not any("microbatch" in axes.get_title(loc="left") for axes in others)


@pytest.mark.parametrize("stage", ["", "policy"])
def test_the_picture_of_a_search_names_its_stage_where_there_are_several(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, named = pictures(monkeypatch), "policy: " * bool(stage)
    draw_search(tmp_path, example(), 4096, stage)
    draw_profile(tmp_path, profiled(), stage)
    rows, lengths = (figure.axes[0].get_title(loc="left") for figure in drawn)
    assert rows.startswith(f"{named}{example().rows} rows of 4096 tokens fit (peak: ")
    assert lengths.startswith(f"{named}samples of any length fit, up to ")


def test_sizes_that_are_close_to_each_other_are_not_written_over_each_other() -> None:
    assert legible([256, 512, 1024, 1200], 190, 1380, apart=0.2) == [1200, 512, 256]
    assert legible([8, 4, 8, 16], 4, 16, apart=0.2) == [16, 8, 4]
    assert legible([7], 5, 9, apart=0.2) == [7]


def test_many_stages_are_small_multiples_with_one_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    stages = ["generate", "values", "train value", "train policy"]
    for number, stage in enumerate(stages):
        journal.event(Event(kind=EPOCH, step=0, reason="", stage=stage, after=16, unit="rows"))
        for step in range(20, 20 + 4 * number, 4):
            changed = {"stage": stage, "unit": "rows", "reason": ""}
            journal.event(Event(kind=RECOVERY, step=step, before=16, after=8, **changed))
            journal.event(Event(kind=GROWTH, step=step + 2, before=8, after=16, **changed))
    for step in range(1, 41):
        journal.step(step, {})
    figure = drawn_run(tmp_path, monkeypatch)
    key, *small = figure.axes
    assert key.get_title(loc="left") == "most rows in a microbatch, by stage"
    assert [text.get_text() for text in key.texts] == [
        "out of memory: step repeated in smaller microbatches",
        "no trouble for a while: larger microbatches tried again",
    ]
    assert [axes.get_title(loc="left") for axes in small] == [
        "generate",
        "values · repeated 1 time",
        "train value · repeated 2 times",
        "train policy · repeated 3 times",
    ]
    assert not any(axes.texts for axes in small)
    assert [len(marked(axes, "v")) for axes in small] == [0, 1, 2, 3]


@pytest.mark.parametrize("step", [2, 14, 17, 20, 23, 26, 39])
def test_what_a_mark_means_is_said_within_its_panel(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.event(Event(kind=RECOVERY, step=step, reason="", before=16, after=8, unit="rows"))
    for each in range(1, 41):
        journal.step(each, {})
    figure = drawn_run(tmp_path, monkeypatch)
    (axes,) = figure.axes
    figure.draw_without_rendering()
    (said,), panel = axes.texts, axes.get_window_extent()
    assert panel.x0 - 1 <= said.get_window_extent().x0
    assert said.get_window_extent().x1 <= panel.x1 + 1


def test_a_batch_that_grows_has_a_panel_with_its_mark_where_it_rises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    for step in range(1, 9):
        journal.step(step, {"samples": 16 if step <= 4 else 32})
    journal.event(Event(kind=SCHEDULE, step=4, reason="", unit="samples", before=16, after=32))
    (samples,) = drawn_run(tmp_path, monkeypatch).axes
    assert line_of(samples, "samples") == (list(range(1, 9)), [16] * 4 + [32] * 4)
    assert marked(samples, "o") == [(4.5, 32)]
