"""The picture of a run shows what its record says, where it happened, and no words over others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import cut_off, line_of, marked, overlapping, pictures
from tests.unit.record.test_tables import GIB
from torchtune_adaptive.limits.change import EXHAUSTED, GROWTH, RECOVERY, THRASHING, TRIAL
from torchtune_adaptive.record.charts.limits import Scale
from torchtune_adaptive.record.charts.panels import draw_imbalance
from torchtune_adaptive.record.charts.run import draw_run, panels_of, title
from torchtune_adaptive.record.charts.style import legible
from torchtune_adaptive.record.events import EPOCH, EVENTS_FILE, SCHEDULE, START, Event
from torchtune_adaptive.record.journal import Journal
from torchtune_adaptive.record.limit_course import LimitCourse
from torchtune_adaptive.record.timeline import read_timeline

EARLIER_STAGES = Path(__file__).parent / "earlier_stages"
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
    assert marked(limit, "^") == [(14.5, 4)]  # from where it rises: at its top the next failure may be
    assert [text.get_text() for text in limit.texts] == [
        "4 rows instead of 8",
        "out of memory 2 times: step repeated in smaller microbatches",
        "larger microbatches tried again once",
    ]
    assert limit.texts[0].get_position() == ((15 + 30.5) / 2, pytest.approx(6))  # from 10 to 14.5 there is no room
    (shade,) = limit.collections
    assert {tuple(corner) for corner in shade.get_paths()[0].vertices} >= {(10, 4), (10, 8), (30.5, 4), (30.5, 8)}
    assert all(len(set(line.get_xdata())) > 1 or line.get_marker() != "None" for line in limit.lines), "no full height"


def test_memory_is_that_of_the_record_with_a_dot_where_a_step_failed_below_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path)
    figure = drawn_run(tmp_path, monkeypatch)
    _, memory = figure.axes
    steps = list(range(1, STEPS + 1))
    assert line_of(memory, "peak") == (steps, [pytest.approx(step / 32) for step in steps])
    assert line_of(memory, "budget") == (steps, [1.0] * STEPS)
    assert marked(memory, "o")[1:] == [(10, 10 / 32), (15, 15 / 32)]  # the first is that of the words
    assert [text.get_text() for text in memory.texts] == [
        "out of memory: peak before the allocation that failed",
        "budget, 1 GiB",
    ]
    assert max(memory.get_yticks()) <= 1.0, "above are words"
    assert memory.get_xlabel() == "step"
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "most rows in a microbatch",
        "peak memory of the fullest rank (GiB)",
    ]
    assert all(axes.get_legend() is None for axes in figure.axes)
    assert cut_off(figure) == []
    assert overlapping(figure) == []


def test_all_that_is_left_of_the_panels_is_right_of_where_the_title_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path)
    figure = drawn_run(tmp_path, monkeypatch)
    figure.draw_without_rendering()
    said = figure._suptitle.get_window_extent().x0
    lefts = [axes.get_tightbbox().x0 for axes in figure.axes]
    assert min(lefts) == pytest.approx(said, abs=3)


def test_the_title_of_a_run_says_what_happened(tmp_path: Path) -> None:
    a_run(tmp_path)
    assert (
        title(read_timeline(tmp_path))
        == "30 steps, 2 out-of-memory errors survived, 9 % of the time lost in failed attempts"
    )
    journal = Journal(tmp_path)
    journal.event(Event(kind=RECOVERY, step=20, reason="", before=8, after=4, unit="rows"))
    journal.step(40, {})
    assert title(read_timeline(tmp_path)).startswith("31 logged steps, 3 out-of-memory errors survived")
    journal.start(Event(kind=START, step=0, reason="another run"))
    journal.step(1, {})
    assert title(read_timeline(tmp_path)) == "1 step, none out of memory"


def test_a_run_that_memory_has_ended_says_so_and_one_that_went_on_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.start(Event(kind=START, step=0, reason=""))
    journal.event(Event(kind=EPOCH, step=0, reason="", after=1, unit="rows"))
    for step in (1, 2, 3):
        journal.step(step, {"samples": 16, "microbatch_rows": 1})
    journal.event(Event(kind=EXHAUSTED, step=4, reason="", before=1, after=1, unit="rows"))
    assert title(read_timeline(tmp_path)) == "3 steps, out of memory for good in step 4"
    figure = drawn_run(tmp_path, monkeypatch)
    assert marked(figure.axes[0], "X") == [(4, 1)]
    assert [text.get_text() for text in figure.axes[0].texts] == ["out of memory, and nothing smaller is left"]
    assert figure.axes[0].get_xlim()[1] == 4.5
    assert cut_off(figure) == []
    assert overlapping(figure) == []
    journal.start(Event(kind=START, step=3, reason="resumed"))
    journal.step(4, {"samples": 16, "microbatch_rows": 1})
    assert title(read_timeline(tmp_path)) == "4 steps, none out of memory"


def a_run_of_ranks(directory: Path, *imbalances: float, unit: str = "bytes") -> None:
    journal = Journal(directory)
    journal.event(Event(kind=EPOCH, step=0, reason="", after=8 * GIB, unit=unit))
    for step, imbalance in enumerate(imbalances, 1):
        journal.step(step, {"samples": 16, "rank_imbalance": imbalance})


def test_ranks_that_wait_for_the_fullest_have_a_panel_that_says_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run_of_ranks(tmp_path, 1.0, 1.3, 1.2)
    figure = drawn_run(tmp_path, monkeypatch)
    _, panel = figure.axes
    assert panel.get_title(loc="left") == "work of the busiest rank beyond the mean of all: 17 % on average"
    assert line_of(panel, "busiest") == ([1, 2, 3], [pytest.approx(percent) for percent in (0, 30, 20)])
    assert [panel.yaxis.get_major_formatter()(value) for value in (0, 2.5, 20)] == ["0 %", "2.5 %", "20 %"]
    assert cut_off(figure) == []


@pytest.mark.parametrize(
    "record",
    [
        a_run,
        lambda directory: a_run_of_ranks(directory, 1.0, 1.0),
        lambda directory: a_run_of_ranks(directory, 1.01, 1.02),
        lambda directory: a_run_of_ranks(directory, 1.3, 1.2, unit="rows"),
    ],
    ids=["old", "one rank", "as even as dealing makes it", "not dealt"],
)
def test_nothing_is_said_of_ranks_where_that_is_nothing_to_look_into(
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
        "most bytes in a microbatch, by stage",
        "policy, GiB · out of memory once",
        "value, GiB · out of memory once",
    ]
    assert line_of(figure.axes[1], "limit") == ([0.5, 2, 3.5], [4, 2, 2])


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
        "most rows in a microbatch, by stage",
        "reference",
        "policy · out of memory once",
    ]
    _, reference, policy = figure.axes
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


def test_sizes_that_are_close_to_each_other_are_not_written_over_each_other() -> None:
    assert legible([256, 512, 1024, 1200], 0.2, Scale(256, 1200, 0, 1).share) == [1200, 512, 256]
    assert legible([8, 4, 8, 16], 0.2, Scale(4, 16, 0, 1).share) == [16, 8, 4]
    assert legible([7], 0.2, Scale(7, 7, 0, 1).share) == [7]


def test_a_scale_is_logarithmic_where_the_lower_sizes_would_lie_on_each_other_and_the_panel_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Scale(4, 8, 0.2, 0.8).share(6) == pytest.approx(0.5)
    assert Scale(1, 16, 0.2, 0.8).share(4) == pytest.approx(0.5)
    assert Scale(5, 5, 0.2, 0.8).share(5) == pytest.approx(0.5)
    for scale in (Scale(4, 8, 0.2, 0.8), Scale(1, 16, 0.2, 0.8), Scale(5, 5, 0.2, 0.8)):
        assert scale.size(scale.share(scale.high)) == pytest.approx(scale.high)
    journal = Journal(tmp_path)
    for step, before in ((2, 16), (4, 8), (6, 4), (8, 2)):
        journal.event(Event(kind=RECOVERY, step=step, reason="", before=before, after=before // 2, unit="rows"))
    for step in range(1, 21):
        journal.step(step, {})
    figure = drawn_run(tmp_path, monkeypatch)
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "most rows in a microbatch, logarithmic"
    assert axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.texts if text.get_gid() == "spell"] == ["1 row instead of 16"]
    assert overlapping(figure) == []


def test_a_spell_is_one_over_the_ends_of_epochs() -> None:
    course = LimitCourse("", "rows", at=[0.5, 3, 10.5, 20.5, 30.5], sizes=[8, 4, 4, 4, 8])
    assert course.spells(40.5) == [(3, 30.5, 4, 8)]


def test_a_shade_without_room_for_words_is_explained_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.event(Event(kind=RECOVERY, step=39, reason="", before=8, after=4, unit="rows"))
    for step in range(1, 41):
        journal.step(step, {})
    figure = drawn_run(tmp_path, monkeypatch)
    assert figure.axes[0].get_title(loc="left") == "most rows in a microbatch, shaded: lowered during the run"
    assert cut_off(figure) == []


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
        "larger microbatches tried again",
        "shaded: lowered during the run",
    ]
    assert [axes.get_title(loc="left") for axes in small] == [
        "generate",
        "values · out of memory once",
        "train value · out of memory 2 times",
        "train policy · out of memory 3 times",
    ]
    assert not any(axes.texts for axes in small)
    assert [len(marked(axes, "v")) for axes in small] == [0, 1, 2, 3]


def test_stages_that_never_fail_need_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    for stage in ("reference", "policy"):
        journal.event(of_a_stage(EPOCH, 0, stage, 4))
    journal.step(1, {})
    figure = drawn_run(tmp_path, monkeypatch)  # without a warning
    assert [len(axes.texts) for axes in figure.axes] == [0, 0, 0]
    assert cut_off(figure) == []


@pytest.mark.parametrize("step", [2, 14, 17, 20, 23, 26, 39])
def test_what_a_mark_means_is_said_within_its_panel(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    journal.event(Event(kind=RECOVERY, step=step, reason="", before=16, after=8, unit="rows"))
    for each in range(1, 41):
        journal.step(each, {})
    figure = drawn_run(tmp_path, monkeypatch)
    (axes,) = figure.axes
    figure.draw_without_rendering()
    (said,), panel = [text for text in axes.texts if text.get_gid() != "spell"], axes.get_window_extent()
    assert panel.x0 - 1 <= said.get_window_extent().x0
    assert said.get_window_extent().x1 <= panel.x1 + 1
    assert overlapping(figure) == []


def test_a_batch_that_grows_has_a_panel_with_its_mark_where_it_rises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    for step in range(1, 9):
        journal.step(step, {"samples": 16 if step <= 4 else 32})
    journal.event(Event(kind=SCHEDULE, step=4, reason="", unit="samples", before=16, after=32))
    figure = drawn_run(tmp_path, monkeypatch)
    (samples,) = figure.axes
    assert line_of(samples, "samples") == (list(range(1, 9)), [16] * 4 + [32] * 4)
    assert marked(samples, "o")[1:] == [(4.5, 32)]  # the first is that of the words
    assert [text.get_text() for text in samples.texts] == ["changed by the batch schedule, once"]
    assert list(samples.get_yticks()) == [16, 32]
    assert overlapping(figure) == []


def test_no_words_lie_over_others_or_over_a_mark_whatever_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds of change, and a step that fails right after the limit was raised."""
    journal = Journal(tmp_path)
    changes = [(RECOVERY, 6, 8, 4), (GROWTH, 17, 4, 8), (RECOVERY, 18, 8, 4), (THRASHING, 60, 4, 2), (TRIAL, 64, 2, 4)]
    for kind, step, before, after in changes:
        journal.event(Event(kind=kind, step=step, reason="", before=before, after=after, unit="rows"))
    for step in range(1, 121):
        journal.step(step, {"peak_bytes": GIB * (step % 7) / 6, "budget_bytes": GIB})
    figure = drawn_run(tmp_path, monkeypatch)
    limit, memory = figure.axes
    assert overlapping(figure) == []
    assert cut_off(figure) == []
    shown = [line for axes in (limit, memory) for line in axes.lines if line.get_marker() in "v^sDo"]
    marks = [
        (line.get_marker(), round(float(across)), round(float(up)))
        for line in shown
        for across, up in line.get_transform().transform(list(zip(*line.get_data(), strict=True)))
    ]
    assert len(marks) == 2 + 1 + 1 + 1 + 2 + 1
    between = [abs(a[1] - b[1]) + abs(a[2] - b[2]) for i, a in enumerate(marks) for b in marks[:i]]
    assert min(between) > 7 * figure.dpi / 72, "one mark covers another"
