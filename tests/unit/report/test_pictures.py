"""Plots show the recorded data; a failed plot never ends a run."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.saved_figures import is_drawn, legend_of, line_of, marked, pictures
from tests.unit.report.test_tables import GIB
from torchtune_adaptive.cli.main import main
from torchtune_adaptive.engine.governor import EXHAUSTED, GROWTH, RECOVERY, Change
from torchtune_adaptive.report.journal import EPOCH, STEPS_FILE, VALIDATION, Event, Journal, read_timeline
from torchtune_adaptive.report.pictures import MARKS, REPORT_FILE, draw_run, summary

STEPS = 30
SECONDS = {10: 3.0, 15: 2.0}
"""Duration of repeated steps; all others take one second."""
SPEED = "target tokens per second"
MEMORY = "peak memory of the fullest rank (GiB)"


def started(directory: Path, step: int = 0) -> Journal:
    journal = Journal(directory)
    journal.start(step)
    return journal


def set_to(journal: Journal, after: int, step: int = 0, stage: str | None = None, unit: str = "rows") -> None:
    journal.event(Event(kind=EPOCH, step=step, stage=stage, reason="", after=after, unit=unit))


def changed(kind: str, step: int, before: int, after: int, **others: Any) -> Change:
    known = {"kind": kind, "step": step, "reason": "", "unit": "rows", "before": before, "after": after}
    return Change(**{**known, **others})


def a_run(directory: Path) -> Journal:
    """Write thirty steps: out of memory in step 10, growth after step 14, and out of memory right after."""
    journal = started(directory)
    set_to(journal, 8)
    for step in range(1, STEPS + 1):
        memory = {"peak_bytes": step * 2**25, "budget_bytes": GIB}
        speed = {"target_tokens": 600, "target_tokens_per_second": 600 / SECONDS.get(step, 1.0)}
        journal.step(step, {"samples": 16, **speed, **memory})
    journal.event(changed(RECOVERY, 10, 8, 4, lost_seconds=2.0))
    journal.event(changed(GROWTH, 14, 4, 8))
    journal.event(changed(RECOVERY, 15, 8, 4, lost_seconds=1.0))
    return journal


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures saved in the test."""
    return pictures(monkeypatch)


def drawn_run(directory: Path, drawn: list[Any]) -> Any:
    draw_run(directory)
    assert is_drawn(directory / REPORT_FILE)
    return drawn[0]


def titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_limit_is_plotted_by_step_with_marks_at_changes(tmp_path: Path, drawn: list[Any]) -> None:
    a_run(tmp_path)
    figure = drawn_run(tmp_path, drawn)
    speed, memory, limit = figure.axes
    assert line_of(limit, "limit") == ([0.5, 10, 14.5, 15, 30.5], [8, 4, 8, 4, 4])
    assert marked(limit, "v") == [(10, 8), (15, 8)]
    assert marked(limit, "^") == [(14.5, 4)]
    assert line_of(speed, "speed")[1] == [600 / SECONDS.get(step, 1.0) for step in range(1, STEPS + 1)]
    assert line_of(memory, "memory limit")[1] == [1.0] * STEPS
    assert line_of(memory, "peak memory")[1] == [pytest.approx(step / 32) for step in range(1, STEPS + 1)]
    assert titles(figure) == [SPEED, MEMORY, "most rows in a microbatch"]
    assert {MARKS[RECOVERY][2], MARKS[GROWTH][2], "limit", "memory limit"} < set(legend_of(figure))


def test_losses_of_a_validated_run_have_a_panel(tmp_path: Path, drawn: list[Any]) -> None:
    journal = started(tmp_path)
    for step in (1, 2, 3, 4):
        journal.step(step, {"loss": 5.0 - step, "peak_bytes": GIB, "budget_bytes": GIB})
    for step in (2, 4):
        journal.event(Event(kind=VALIDATION, step=step, reason="", val_loss=6.0 - step))
    figure = drawn_run(tmp_path, drawn)
    assert titles(figure) == ["loss", MEMORY]
    assert line_of(figure.axes[0], "training loss") == ([1, 2, 3, 4], [4, 3, 2, 1])
    assert line_of(figure.axes[0], "validation loss") == ([2, 4], [4, 2])


def test_title_summarizes_the_run(tmp_path: Path) -> None:
    journal = a_run(tmp_path)
    assert (
        summary(read_timeline(tmp_path))
        == "30 steps, 2 out-of-memory errors survived, 9.1 % of the time in failed attempts"
    )
    journal.event(changed(RECOVERY, 20, 8, 4))  # without seconds, no share is known
    journal.step(40, {})
    assert summary(read_timeline(tmp_path)) == "40 steps, 3 out-of-memory errors survived"
    started(tmp_path).step(1, {})
    assert summary(read_timeline(tmp_path)) == "1 step, no out-of-memory error"


def test_run_ended_by_oom_has_that_title_unless_it_continued(tmp_path: Path, drawn: list[Any]) -> None:
    journal = started(tmp_path)
    set_to(journal, 1)
    for step in (1, 2, 3):
        journal.step(step, {})
    journal.event(changed(EXHAUSTED, 4, 1, 1))
    figure = drawn_run(tmp_path, drawn)
    assert figure.get_suptitle().endswith("\n3 steps, ended out of memory in step 4")
    assert marked(figure.axes[0], "X") == [(4, 1)]
    assert figure.axes[0].get_xlim()[1] == 4.5
    started(tmp_path, step=3).step(4, {})
    assert summary(read_timeline(tmp_path)) == "4 steps, no out-of-memory error"


def test_each_stage_has_a_panel_from_the_first_step(tmp_path: Path, drawn: list[Any]) -> None:
    """Two epochs of two stages; the reference also ran out of memory before training."""
    journal = started(tmp_path)
    journal.event(changed(RECOVERY, 0, 16, 8, stage="reference"))
    for step, after in ((0, 2 * GIB), (2, 4 * GIB)):
        set_to(journal, 8 - step, step, "reference")
        set_to(journal, after, step, "policy", "bytes")
    journal.event(changed(RECOVERY, 4, 4 * GIB, 3 * GIB, stage="policy", unit="bytes"))
    for step in range(1, 5):
        journal.step(step, {"peak_bytes": GIB, "budget_bytes": 4 * GIB})
    figure = drawn_run(tmp_path, drawn)
    _, reference, policy = figure.axes
    assert titles(figure)[1:] == [
        "reference: most rows in a microbatch",
        "policy: most memory of a microbatch, predicted (GiB)",
    ]
    assert line_of(reference, "limit") == ([0.5, 2.5, 4.5], [8, 6, 6])
    assert line_of(policy, "limit") == ([0.5, 2.5, 4, 4.5], [2, 4, 3, 3])


@pytest.mark.parametrize("value", [None, "8", True, float("nan"), 10**400], ids=str)
def test_invalid_figure_is_not_plotted(tmp_path: Path, drawn: list[Any], value: Any) -> None:
    journal = a_run(tmp_path)
    journal.step(31, dict.fromkeys(["samples", "target_tokens", "target_tokens_per_second"], value))
    journal.step(32, {"peak_bytes": value, "budget_bytes": GIB})
    journal.event(changed(RECOVERY, 31, 8, value, lost_seconds=value))
    assert len(line_of(drawn_run(tmp_path, drawn).axes[2], "limit")[0]) == 5


def draw_a_run(directory: Path) -> None:
    a_run(directory)
    draw_run(directory)


def test_failed_plot_gives_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / REPORT_FILE).mkdir()
    draw_a_run(tmp_path)
    (tmp_path / REPORT_FILE).rmdir()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no font found\nand much more about it")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    draw_a_run(tmp_path)
    assert caplog.messages == [f"{REPORT_FILE} is not drawn: {why}" for why in ("Is a directory", "no font found")]


def test_missing_matplotlib_gives_one_line_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level("INFO"):
        draw_a_run(tmp_path)
    assert caplog.messages == [f"{REPORT_FILE} is not drawn: pip install matplotlib"]


def test_a_limit_that_never_changed_has_no_panel(tmp_path: Path, drawn: list[Any]) -> None:
    journal = started(tmp_path)
    for step in (0, 2):  # two epochs
        set_to(journal, 8, step)
    for step in (1, 2, 3, 4):
        journal.step(step, {"peak_bytes": GIB, "budget_bytes": GIB})
    figure = drawn_run(tmp_path, drawn)
    assert titles(figure) == [MEMORY]
    assert figure.get_suptitle().endswith("\n4 steps, no out-of-memory error")


def report(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[object, str]:
    """Run `tune-adaptive report`; return its exit status and output."""
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, words)])
    out, error = capsys.readouterr()
    assert not (out and error)
    return ended.value.code, out or error


def test_command_draws_an_unfinished_run_with_its_name_and_date(
    tmp_path: Path, drawn: list[Any], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "costs_$5_and_$6"
    a_run(run)
    with (run / STEPS_FILE).open("ab") as file:
        file.write(b'null\n{"step": 31, "los\xff')
    assert report(capsys, run) == (0, f"{run / REPORT_FILE}\n")
    assert caplog.messages == [f"{run / STEPS_FILE}: 2 of 32 lines cannot be read and are skipped"]
    assert is_drawn(run / REPORT_FILE)
    title = drawn[0].get_suptitle().replace("\\$", "$")
    assert f"{str(run)[-30:]}, {time.strftime('%Y-%m-%d')}" in title
    assert title.endswith(summary(read_timeline(run)))


def test_picture_is_written_to_the_given_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "a")
    path = tmp_path / "mine.png"
    assert report(capsys, tmp_path / "a", "--output", path) == (0, f"{path}\n")
    assert is_drawn(path)
    assert not list(tmp_path.glob("a/*.png"))


def test_a_run_that_cannot_be_drawn_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = tmp_path / STEPS_FILE
    nothing = f"error: no step is recorded in {steps}; name the output_dir of a run\n"
    assert report(capsys, tmp_path) == (1, nothing)
    steps.write_text("damaged\n")
    assert report(capsys, tmp_path) == (1, nothing)
    steps.unlink()
    steps.mkdir()
    assert report(capsys, tmp_path) == (1, f"error: {steps}: Is a directory; correct the path\n")
    a_run(run := tmp_path / "run")
    (tmp_path / "file").touch()
    assert report(capsys, run, "--output", tmp_path / "file" / "a.png")[0] == 1
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report(capsys, run) == (1, "error: a picture needs matplotlib: pip install matplotlib\n")


def test_name_that_the_font_lacks_gives_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    draw_a_run(tmp_path / "漢字")
    assert is_drawn(tmp_path / "漢字" / REPORT_FILE)
    assert not [str(each.message) for each in recwarn if "Glyph" in str(each.message)]
