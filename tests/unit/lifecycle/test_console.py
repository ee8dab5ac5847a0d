"""Log lines, and progress with and without a terminal; a run survives a closed log."""

import io
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.ranks import PATIENCE
from torchtune_adaptive.lifecycle import console
from torchtune_adaptive.lifecycle.console import log_to_stderr, progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """Our logger as at the start of a process."""
    logger = logging.getLogger(console.PACKAGE_LOGGER)
    before, propagates = list(logger.handlers), logger.propagate
    logger.handlers.clear()
    logger.propagate = True  # pytest listens at each logger that does not propagate
    yield logger
    logger.handlers[:], logger.propagate = before, propagates


def shown_in(stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Replace stderr. A fixture would be too early: pytest installs its own when the test begins."""
    monkeypatch.setattr("sys.stderr", stderr)
    log_to_stderr()
    return stderr


@pytest.mark.parametrize(("between_s", "middle"), [(30, []), (0, [2, 3, 4])])
def test_without_a_terminal_progress_has_first_last_and_some_lines_between(
    ours: logging.Logger, monkeypatch: pytest.MonkeyPatch, between_s: float, middle: list[int]
) -> None:
    monkeypatch.setattr(console, "BETWEEN_LINES_S", between_s)
    written = shown_in(io.StringIO(), monkeypatch)
    with progress_bar("epoch 1", 5, "steps", done=1, at_once=True) as bar:
        for step in (2, 3, 4, 5):
            bar.set_postfix_str(f"loss {step}.0", refresh=False)
            bar.update()
    first, *between, last = re.sub(r", \S+ left", "", written.getvalue()).splitlines()
    assert (first, last) == ("epoch 1 · 1 of 5 steps", "epoch 1 · 5 of 5 steps, loss 5.0")
    assert between == [f"epoch 1 · {step} of 5 steps, loss {step}.0" for step in middle]


def test_in_a_terminal_progress_is_a_bar_between_lines(ours: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_in(Terminal(), monkeypatch)
    with progress_bar("epoch 1", 3, "steps", at_once=True) as bar:
        bar.set_postfix_str("loss 1.0000", refresh=False)
        bar.update()
        ours.info("out of memory")
        bar.update(2)
    written = terminal.getvalue()
    assert "epoch 1: " in written
    assert "loss 1.0000" in written
    assert any(part.strip() == "out of memory" for part in written.replace("\r", "\n").split("\n"))
    assert "of 3 steps" not in written


def test_silent_run_logs_its_phase(ours: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "SILENT_S", 1)
    written = shown_in(io.StringIO(), monkeypatch)
    with console.never_silent(lambda: "still setting up"):
        for _ in range(10):
            ours.info("a line")
            time.sleep(0.1)
        assert "still" not in written.getvalue()
        time.sleep(1.5)
    assert written.getvalue().count("still setting up, ") == 1


FALLS_SILENT = """
import time
from torchtune_adaptive.lifecycle.console import progress_bar, log_to_stderr
log_to_stderr()
time.sleep(0.5)
with progress_bar("epoch 1", 2, "steps", at_once=True) as bar:
    bar.update(2)
"""


def test_run_survives_a_closed_log() -> None:
    command = f"{sys.executable} -c '{FALLS_SILENT}' 2>&1 | true; echo ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30 * PATIENCE, check=False)
    assert ended.stdout == "0\n"
