"""The record of a run: what is written, what is read back, and the picture of it."""

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pictures import is_drawn, pictures
from torchtune_adaptive.limits.change import GROWTH, RECOVERY
from torchtune_adaptive.record.charts.run import REPORT_FILE, draw_run, main
from torchtune_adaptive.record.events import EVENTS_FILE, START, STEPS_FILE, Event
from torchtune_adaptive.record.journal import Journal
from torchtune_adaptive.record.timeline import read_timeline

ROWS = "rows of the largest microbatch"
MEMORY = "peak memory of the fullest rank (GiB)"


def figures(rows: int, **others: float) -> dict[str, float]:
    return {
        "samples": 16,
        "microbatch_rows": rows,
        "target_tokens": 500,
        "target_tokens_per_second": 1000.0 + rows,
        **others,
    }


def start(journal: Journal, step: int) -> None:
    journal.start(Event(kind=START, step=step, reason="training starts"))


def trained(directory: Path, first: int = 1, last: int = 20, rows: int = 8) -> Journal:
    journal = Journal(directory)
    start(journal, first - 1)
    for step in range(first, last + 1):
        journal.step(step, figures(rows))
    return journal


def steps_and_rows(directory: Path) -> list[tuple[int, int]]:
    return [(record["step"], record["microbatch_rows"]) for record in read_timeline(directory).steps]


def test_an_event_is_one_line_without_what_does_not_apply(tmp_path: Path) -> None:
    event = Event(kind=RECOVERY, step=3, reason="step 3: out of memory", before=8, after=4, unit="rows", ranks=(1,))
    Journal(tmp_path).event(event)
    record = json.loads((tmp_path / EVENTS_FILE).read_text())
    assert record.pop("time") > 1.7e9
    assert record == {
        "kind": "recovery",
        "step": 3,
        "reason": "step 3: out of memory",
        "unit": "rows",
        "before": 8,
        "after": 4,
        "ranks": [1],
    }


def test_a_resumed_run_goes_on_where_its_checkpoint_was(tmp_path: Path) -> None:
    journal = trained(tmp_path, last=20, rows=8)
    journal.event(Event(kind=RECOVERY, step=18, reason="lost", before=8, after=4, unit="rows"))
    journal.event(Event(kind=RECOVERY, step=9, reason="kept", before=8, after=4, unit="rows"))
    trained(tmp_path, first=11, last=15, rows=4)
    assert steps_and_rows(tmp_path) == [*((step, 8) for step in range(1, 11)), *((step, 4) for step in range(11, 16))]
    assert [event["reason"] for event in read_timeline(tmp_path).events if event["kind"] == RECOVERY] == ["kept"]


def test_a_new_run_in_the_same_place_is_another_one(tmp_path: Path) -> None:
    trained(tmp_path, last=20, rows=8)
    trained(tmp_path, last=5, rows=4)
    assert steps_and_rows(tmp_path) == [(step, 4) for step in range(1, 6)]
    assert len(read_timeline(tmp_path).events) == 1


def test_a_line_that_a_crash_left_unfinished_is_passed_over(tmp_path: Path) -> None:
    trained(tmp_path, last=3)
    with (tmp_path / STEPS_FILE).open("a") as file:
        file.write('{"step": 4, "micro')
    assert [step for step, _ in steps_and_rows(tmp_path)] == [1, 2, 3]


def panels_of(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the panels of the picture show."""
    drawn = pictures(monkeypatch)
    path = draw_run(directory, read_timeline(directory))
    assert path is not None
    assert is_drawn(path)
    return [axes.get_title(loc="left") for axes in drawn[0].axes]


def test_the_picture_shows_sizes_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    start(journal, 0)
    for step in range(1, 30):
        journal.step(step, figures(8 if step < 10 else 4, peak_bytes=step * 2**25, budget_bytes=2**30))
    journal.event(Event(kind=RECOVERY, step=10, reason="", before=8, after=4, unit="rows"))
    journal.event(Event(kind=GROWTH, step=25, reason="", before=4, after=8, unit="rows"))
    assert panels_of(tmp_path, monkeypatch) == ["most rows in a microbatch", MEMORY]


def test_where_nothing_measures_memory_there_is_no_panel_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path)
    assert panels_of(tmp_path, monkeypatch) == [ROWS]


def test_without_matplotlib_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level("INFO"):
        assert draw_run(tmp_path, read_timeline(tmp_path)) is None
    assert [record.getMessage() for record in caplog.records] == [
        "adaptive_report.png is not drawn: pip install matplotlib"
    ]


def test_a_folder_without_a_run_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_picture", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("torchtune_adaptive.run_picture", run_name="__main__")
    assert ended.value.code == 1
    assert f"nothing to draw: {tmp_path} holds no record" in capsys.readouterr().err


def test_a_run_without_matplotlib_is_not_said_to_be_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(sys, "argv", ["run_picture", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "nothing to draw" not in capsys.readouterr().err
    assert "pip install" in caplog.text


LINES: dict[str, bytes] = {
    "no UTF-8": b'{"time": 1, "step": 2, "kind": "recovery", "reason": "\xff"}',
    "null": b"null",
    "a list": b"[1]",
    "a number": b"7",
    "no step": b'{"time": 1, "kind": "recovery"}',
    "no time": b'{"step": 2, "kind": "recovery"}',
    "a step that is text": b'{"time": 1, "step": "2", "kind": "recovery"}',
    "a step that is true": b'{"time": 1, "step": true, "kind": "recovery"}',
    "a step that is NaN": b'{"time": 1, "step": NaN, "kind": "recovery"}',
    "a step below none": b'{"time": 1, "step": -1, "kind": "recovery"}',
    "a step with 400 digits": b'{"time": 1, "kind": "recovery", "step": ' + b"9" * 400 + b"}",
    "a step with 9000 digits": b'{"time": 1, "kind": "recovery", "step": ' + b"9" * 9000 + b"}",
    "a time that is NaN": b'{"time": NaN, "step": 2, "kind": "recovery"}',
    "a kind that is a list": b'{"time": 1, "step": 2, "kind": ["start"]}',
    "a kind that is an object": b'{"time": 1, "step": 2, "kind": {}}',
    "a start without a step": b'{"time": 1, "kind": "start"}',
    "100,000 deep": b'{"time": 1, "step": 2, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "torn": b'{"time": 1, "step": 2, "ki',
    "zeros": b"\0" * 512,
    "a mark in front": b'\xef\xbb\xbf{"time": 1, "step": 2, "kind": "recovery"}',
}


@pytest.mark.parametrize("content", LINES.values(), ids=LINES)
def test_a_line_that_no_run_has_written_is_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    trained(tmp_path, last=2)
    for name in (EVENTS_FILE, STEPS_FILE):
        with (tmp_path / name).open("ab") as file:
            file.write(content + b"\n" + content)
    journal = Journal(tmp_path)
    journal.step(3, figures(8))
    journal.event(Event(kind=RECOVERY, step=3, reason="kept"))
    timeline = read_timeline(tmp_path)
    assert [record["step"] for record in timeline.steps] == [1, 2, 3]
    assert [event["kind"] for event in timeline.events] == [START, RECOVERY]
    assert caplog.messages == [
        f"{tmp_path / STEPS_FILE}: 2 of 5 lines cannot be read and are left out",
        f"{tmp_path / EVENTS_FILE}: 2 of 4 lines cannot be read and are left out",
    ]


def test_a_folder_in_the_place_of_a_file_is_said_to_be_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, last=2)
    (tmp_path / EVENTS_FILE).unlink()
    (tmp_path / EVENTS_FILE).mkdir()
    timeline = read_timeline(tmp_path)
    assert (len(timeline.steps), timeline.events) == (2, ())
    assert caplog.messages == [f"{tmp_path / EVENTS_FILE} cannot be read: not a file"]


@pytest.mark.parametrize("value", [None, "8", [8], {}, True, float("nan"), float("-inf"), 10**400], ids=str)
def test_a_figure_that_is_no_number_is_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    journal = trained(tmp_path, last=5)
    journal.step(6, dict.fromkeys(["samples", "microbatch_rows", "target_tokens", "target_tokens_per_second"], value))
    journal.step(7, {"peak_bytes": value, "budget_bytes": 2**30})
    journal.event(Event(kind=RECOVERY, step=5, reason="", unit="rows", before=8, after=value, lost_seconds=value))
    assert panels_of(tmp_path, monkeypatch) == [ROWS]


def break_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no font found\nand much more about it")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    return "no font found"


def put_a_folder_there(tmp_path: Path, _: pytest.MonkeyPatch) -> str:
    (tmp_path / REPORT_FILE).mkdir()
    return "Is a directory"


@pytest.mark.parametrize("spoil", [break_matplotlib, put_a_folder_there])
def test_a_picture_that_cannot_be_drawn_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path, pytest.MonkeyPatch], str],
) -> None:
    trained(tmp_path)
    cause = spoil(tmp_path, monkeypatch)
    assert draw_run(tmp_path, read_timeline(tmp_path)) is None
    assert caplog.messages == [f"adaptive_report.png is not drawn: {cause}"]


def test_the_command_draws_what_can_be_read_and_says_what_is_left_out(tmp_path: Path) -> None:
    trained(tmp_path)
    with (tmp_path / STEPS_FILE).open("ab") as file:
        file.write(b'null\n{"step": 21, "micro\xff')
    command = [sys.executable, "-m", "torchtune_adaptive.run_picture", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"{tmp_path / STEPS_FILE}: 2 of 22 lines cannot be read and are left out" in ended.stderr
    assert is_drawn(tmp_path / REPORT_FILE)
