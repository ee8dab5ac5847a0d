"""The record of a run: writing never fails, and a crash damages at most the last line.

The tests of crashes compare the history of resumed runs with that of an undisturbed one.
"""

import json
import math
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.timeline import lines_of, read_timeline
from tests.unit.data.minimal_config import NEEDED
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.limit_policy import RECOVERY, Change
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.loop import metrics
from torchtune_adaptive.loop.metrics import EPOCH, EVENTS_FILE, START, STEPS_FILE, Journal, Metrics, record_epoch

FILES = (EVENTS_FILE, STEPS_FILE)


def recovery(step: int, **others: Any) -> Change:
    return Change(kind=RECOVERY, step=step, reason="out of memory", unit="rows", before=8, after=4, **others)


def write_a_run(directory: Path) -> None:
    journal = Journal(directory)
    journal.start(0)
    for step in range(1, 4):
        journal.step(step, {"loss": 1.0})
        journal.event(recovery(step))


def steps_in(directory: Path) -> list[int]:
    return [record["step"] for record in read_timeline(directory).steps]


def a_file_instead(directory: Path) -> None:
    directory.write_text("")


def folders_instead(directory: Path) -> None:
    for name in FILES:
        (directory / name).mkdir(parents=True)


def a_full_disk(directory: Path) -> None:
    directory.mkdir()
    for name in FILES:
        (directory / name).symlink_to("/dev/full")


CAUSES = {a_file_instead: "Not a directory", folders_instead: "Is a directory", a_full_disk: "No space left on device"}


@pytest.mark.parametrize("spoil", CAUSES, ids=lambda spoil: spoil.__name__)
def test_unwritable_journal_gives_one_line_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    spoil(tmp_path / "out")
    write_a_run(tmp_path / "out")
    (line,) = caplog.messages
    assert line.startswith(f"the record of this run is incomplete: {tmp_path / 'out'}")
    assert line.endswith(f": {CAUSES[spoil]}; training continues")


def test_removed_folder_is_reported_once_and_not_recreated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "out")
    for step in range(1, 4):
        journal.step(step, {})
    (line,) = caplog.messages
    assert "No such file or directory" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("figure", [object(), {object(): 1}, b"bytes"], ids=["object", "key", "bytes"])
def test_unwritable_figure_loses_only_its_line(tmp_path: Path, caplog: pytest.LogCaptureFixture, figure: Any) -> None:
    journal = Journal(tmp_path)
    journal.step(1, {"loss": 1.0})
    journal.step(2, {"loss": figure})
    journal.step(3, {"loss": float("nan")})
    assert steps_in(tmp_path) == [1, 3]
    assert "NaN" not in (tmp_path / STEPS_FILE).read_text(), "it is not JSON"
    assert len(caplog.messages) == 1


@contextmanager
def files_no_larger_than(count: int) -> Iterator[None]:
    """Simulate a full disk for every file of this size. Python ignores the accompanying signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [150, 171, 199, 227])
def test_record_continues_after_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture, room: int) -> None:
    journal = Journal(tmp_path)
    journal.start(0)
    with files_no_larger_than(room):
        for step in range(1, 11):
            journal.step(step, {"loss": 1.0})
    assert [line.partition(":")[0] for line in caplog.messages] == ["the record of this run is incomplete"]
    for step in (11, 12):
        journal.step(step, {"loss": 1.0})
    assert (tmp_path / STEPS_FILE).stat().st_size > room
    steps = steps_in(tmp_path)
    assert steps[-2:] == [11, 12]
    assert steps[:-2] == list(range(1, len(steps) - 1))
    assert 2 <= len(steps[:-2]) < 10


@given(st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_run_killed_at_any_byte_keeps_its_complete_lines_and_appends_whole_ones(
    tmp_path_factory: pytest.TempPathFactory, cuts: tuple[float, float]
) -> None:
    directory, kept = tmp_path_factory.mktemp("run"), dict[str, list[bytes]]()
    write_a_run(directory)
    for name, cut in zip(FILES, cuts, strict=True):
        whole = (directory / name).read_bytes()
        (directory / name).write_bytes(left := whole[: round(cut * len(whole))])
        kept[name] = [line for line in whole.splitlines() if line in left.splitlines()]
    journal = Journal(directory)
    journal.start(1)
    journal.step(2, {"loss": 1.0})
    journal.event(recovery(2))
    for name, added in zip(FILES, ([START, RECOVERY], [START, None]), strict=True):
        lines = lines_of(directory / name)
        assert lines[:-2] == [json.loads(line) for line in kept[name]]
        assert [(line.get("kind"), line["step"]) for line in lines[-2:]] == [(added[0], 1), (added[1], 2)]


def test_limit_of_an_epoch_is_recorded_again_after_a_resume(tmp_path: Path) -> None:
    """Kill the run after the second epoch began and resume it there; then again in the middle of the epoch."""
    for steps_done in (0, 4, 5):
        journal = Journal(tmp_path)
        journal.start(steps_done)
        for step in range(steps_done + 1, 4 + 1):
            journal.step(step, {})
        record_epoch(journal, 1, {"": RowLimit(2)}, max(4, steps_done))
        for step in range(max(4, steps_done) + 1, 6 + 1):
            journal.step(step, {})
    timeline = read_timeline(tmp_path)
    assert [event["step"] for event in timeline.events if event["kind"] == EPOCH] == [4, 5]
    assert [record["step"] for record in timeline.steps] == [1, 2, 3, 4, 5, 6]


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Metrics:
    monkeypatch.setattr(metrics.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(metrics.components, "build", lambda *_: mock.Mock())
    settings = Settings(**{**NEEDED, "output_dir": str(tmp_path)}, config=OmegaConf.create({}))
    return Metrics(settings, torch.device("cpu"), Journal(tmp_path))


def test_validation_loss_that_is_not_finite_is_a_warning(ours: Metrics, caplog: pytest.LogCaptureFixture) -> None:
    ours.log_validation(4, {"val_loss": 1.5})
    ours.log_validation(8, {"val_loss": math.nan})
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("step 8: the validation loss is not finite")
