"""Lines for people, objects for machines, and progress with and without a terminal."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.ranks import PATIENCE
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune import console
from torchtune_adaptive.tune.console import FORMAT, JsonLines, in_json, progress_bar, show_decisions, tell_error


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """Our logger as at the start of a process."""
    logger = logging.getLogger(console.OURS)
    before, propagates = list(logger.handlers), logger.propagate
    logger.handlers.clear()
    logger.propagate = True  # pytest listens at each logger that does not
    yield logger
    logger.handlers[:], logger.propagate = before, propagates


def piped(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Not by a fixture: pytest puts its own in place when the test begins."""
    monkeypatch.setattr("sys.stderr", stderr := io.StringIO())
    return stderr


def test_without_a_terminal_progress_is_a_line_at_first_at_last_and_now_and_then(
    ours: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = piped(monkeypatch)
    show_decisions()
    now_s = time.monotonic()
    with progress_bar("epoch 1", 5, "steps", done=1, at_once=True) as shows:
        for loss in (4.0, 3.0, 2.0, 1.0):
            if loss == 2.0:
                monkeypatch.setattr(console.time, "monotonic", lambda: now_s + console.BETWEEN_LINES_S + 1)
            shows.update(note=f"loss {loss:.4f}")
    assert written.getvalue().splitlines() == [
        "epoch 1 · 2 of 5 steps · loss 4.0000",
        "epoch 1 · 4 of 5 steps · loss 2.0000",
        "epoch 1 · 5 of 5 steps · loss 1.0000",
    ]


def test_what_is_short_says_nothing_and_what_is_not_shown_never_does(
    ours: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = piped(monkeypatch)
    show_decisions()
    for shown, at_once in ((True, False), (False, True)):
        with progress_bar("batch search", None, "probes", shown=shown, at_once=at_once) as shows:
            shows.note("2 rows")
            shows.update()
    assert written.getvalue() == ""


def test_what_takes_long_is_told_without_being_asked(ours: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    written = piped(monkeypatch)
    show_decisions()
    monkeypatch.setattr(console, "BETWEEN_LINES_S", 0)
    with progress_bar("batch search", None, "probes") as shows:
        shows.update()
    assert written.getvalue() == "batch search · 1 probes\n"


def test_more_than_was_expected_is_no_more_than_there_is(ours: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    written = piped(monkeypatch)
    show_decisions()
    monkeypatch.setattr(console, "BETWEEN_LINES_S", 0)
    with progress_bar("tracing", 2, "steps") as shows:
        shows.update(2)
        shows.update()
    assert written.getvalue().splitlines() == ["tracing · 2 of 2 steps", "tracing · 3 of 3 steps"]


def test_in_a_terminal_it_is_a_bar_and_lines_stand_by_themselves(
    ours: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    show_decisions()
    with progress_bar("epoch 1", 3, "steps", at_once=True) as shows:
        shows.update(note="loss 1.0000")
        ours.info("out of memory")
        shows.update(2)
    written = terminal.getvalue()
    assert "epoch 1: " in written
    assert "loss 1.0000" in written
    assert any(part.strip() == "out of memory" for part in written.replace("\r", "\n").split("\n"))
    assert "of 3 steps" not in written


def test_in_json_every_line_is_an_object_progress_and_errors_too(
    ours: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setenv(FORMAT, "json")
    monkeypatch.setenv("RANK", "3")
    show_decisions()
    ours.getChild("step").warning("a table\nof %d lines", 2)
    with progress_bar("epoch 1", 2, "steps", at_once=True) as shows:
        shows.update(note="loss 1.0000")
    tell_error("batch_size is 0")
    lines = [json.loads(line) for line in terminal.getvalue().splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("warning", "a table\nof 2 lines"),
        ("info", "epoch 1 · 1 of 2 steps · loss 1.0000"),
        ("error", "batch_size is 0"),
    ]
    assert all(line["rank"] == 3 and line["time"].endswith("+00:00") for line in lines)
    assert lines[0]["logger"] == f"{console.OURS}.step"


def test_an_object_has_the_traceback_of_what_was_raised() -> None:
    try:
        raise ValueError("a cause")
    except ValueError as error:
        raised = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed", (), raised)
    assert "ValueError: a cause" in json.loads(JsonLines().format(record))["traceback"]


def test_another_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORMAT, "yaml")
    with pytest.raises(ConfigError, match=f"{FORMAT} is 'yaml': allowed is text or json"):
        in_json()


PRINTS = """
import time
from torchtune_adaptive.tune.console import outlive_readers, show_decisions
show_decisions()
outlive_readers()
time.sleep(0.5)
print("first")
print("second")
"""
LOST = "stdout cannot be written ({}): what is printed is lost\n"


@pytest.mark.parametrize("unbuffered", ["", "-u"])
@pytest.mark.parametrize(
    ("into", "printed", "said"),
    [
        ("| cat", "first\nsecond\n", ""),
        ("> /dev/full", "", LOST.format("No space left on device")),
        ("| true", "", LOST.format("Broken pipe")),
        (">&-", "", ""),
    ],
)
def test_a_run_outlives_who_reads_what_is_printed(into: str, printed: str, said: str, unbuffered: str) -> None:
    ended = subprocess.run(
        ["bash", "-c", f"{sys.executable} {unbuffered} -c '{PRINTS}' {into}; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=30 * PATIENCE,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == (f"{printed}0\n", said)
