"""Which rank reports a failure, and which runs a query."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchtune_adaptive.config.keys import REMEDIES
from torchtune_adaptive.errors import (
    CollectiveFailedError,
    LimitExhaustedError,
    RecoveryUnsupportedError,
    Remedy,
    UnrecoverableError,
)
from torchtune_adaptive.lifecycle import entry_point, run_state
from torchtune_adaptive.lifecycle.torchrun import first_to_report


@pytest.fixture(autouse=True)
def _signals_and_hooks_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def be_rank_of(attempt: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as one of two ranks started by torchrun."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    (attempt / str(rank)).mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(attempt / str(rank) / "error.json"))


def test_one_rank_prints_the_message_in_each_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for attempt in ("attempt_0", "attempt_1"):
        be_rank_of(tmp_path / attempt, 1, monkeypatch)
        assert first_to_report()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "a signal would cut off its message"
        be_rank_of(tmp_path / attempt, 0, monkeypatch)
        assert not first_to_report()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_without_a_shared_folder_every_rank_prints_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank_of(tmp_path, 1, monkeypatch)
    for error_file in ("", str(tmp_path / "gone" / "1" / "error.json")):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", error_file)
        assert first_to_report()
        assert first_to_report()


@pytest.mark.parametrize("recover", [False, True])
def test_only_oom_outside_recovery_is_reported_with_remedies(recover: bool) -> None:
    with pytest.raises(RecoveryUnsupportedError) as caught, entry_point.explain_out_of_memory(recover):
        raise torch.OutOfMemoryError("aten.mm needs 9 bytes, but the limit is 8 bytes")
    assert "aten.mm needs 9 bytes, but the limit is 8 bytes" in caught.value.in_words(REMEDIES)
    assert (Remedy.RECOVERY in caught.value.remedies) == (not recover)
    for error in (KeyError("no memory"), LimitExhaustedError("out of memory")):
        with pytest.raises(type(error)) as unchanged, entry_point.explain_out_of_memory(recover):
            raise error
        assert unchanged.value is error


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (CollectiveFailedError("rank 1 has ended"), None),
        (RuntimeError("a fault of the device"), None),
        (UnrecoverableError("too much"), run_state.ERROR),
    ],
)
def test_only_an_unrecoverable_run_is_recorded_as_broken(
    error: Exception, ended: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_state.write_record(tmp_path, run_state.RunRecord(serial=0))
    monkeypatch.setattr(entry_point.THIS_RUN, "record_directory", tmp_path)

    def fail() -> None:
        raise error

    with pytest.raises(SystemExit):
        entry_point.exit_with_one_message(fail)
    run = run_state.read_record(tmp_path)
    assert run is not None
    assert run.ended == ended


@pytest.mark.parametrize(("status", "ended"), [(None, 1), (0, 1), (3, 3)])
def test_early_exit_with_success_is_an_error_and_with_failure_is_kept(
    status: int | None, ended: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        entry_point.exit_with_one_message(lambda: sys.exit(status))
    assert left.value.code == ended
    assert ("SystemExit" in capsys.readouterr().err) == (ended == 1)
