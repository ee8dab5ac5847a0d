"""What went wrong with a checkpoint, in words that a user can act on."""

from __future__ import annotations

import errno
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from torchtune_adaptive.checkpoints import background, folders, loading, outcomes, problems
from torchtune_adaptive.checkpoints.background import BackgroundSave
from torchtune_adaptive.config.remedies import in_keys
from torchtune_adaptive.errors import CheckpointError, UnrecoverableError


def test_the_operating_systems_reason_is_found_below_torchs(tmp_path: Path) -> None:
    error = RuntimeError("basic_ios::clear: iostream error")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert problems.cause(error, tmp_path).startswith("No space left on device (")


def test_a_write_that_was_cut_off_is_told_where_torch_drops_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0")
    assert "limit on the file size" in problems.cause(error, tmp_path)
    monkeypatch.setattr(folders, "free_bytes", lambda path: 0)
    assert problems.cause(error, tmp_path) == "no space left (0 B free)"


def test_out_of_memory_in_a_save_nobody_is_sent_where_nothing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr(outcomes.THIS_RUN, "newest", None)

    def told() -> str:
        with pytest.raises(UnrecoverableError) as caught, outcomes.naming("epoch_0"):
            raise torch.OutOfMemoryError
        return in_keys(caught.value)

    advice = "train on more ranks or raise adaptive.memory_limit if it is set"
    again = "the same command and resume_from_checkpoint=auto"
    assert told().endswith(f"there is no earlier checkpoint; once that is fixed, start over with {again}; {advice}")
    monkeypatch.setattr(outcomes.THIS_RUN, "newest", tmp_path)
    assert told().endswith(f"the last good one is {tmp_path}; once that is fixed, resume with {again}; {advice}")
    assert problems.cause(torch.OutOfMemoryError(), tmp_path) == f"out of memory on rank 0: {advice}"
    assert problems.cause(MemoryError(), tmp_path) == "out of memory on the host of rank 0: free host memory"


def test_a_folder_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    assert problems.cause(FileNotFoundError("x"), tmp_path / "gone") == "the folder is gone"
    with pytest.raises(FileNotFoundError):
        folders.require_folder(tmp_path / "gone")


class Reader:
    """A checkpointer that reads what it was given."""

    def __init__(self, found: object) -> None:
        self._found = found

    def load_checkpoint(self) -> dict[str, object]:
        if isinstance(self._found, Exception):
            raise self._found
        return {"model": self._found}


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([1, 2], "the file contains a list"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory while loading the weights on rank 1"),
        (MemoryError(), "out of memory while loading the weights on rank 1"),
        (ValueError("Unable to load"), "loading the weights failed on rank 1"),
    ],
)
def test_what_one_rank_meets_while_loading_all_ranks_tell(
    monkeypatch: pytest.MonkeyPatch, found: object, says: str
) -> None:
    told: list[object] = []

    def gathered(mine: object) -> list[object]:
        told.append(mine)
        return [(None, False), mine]

    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr(loading, "from_all_ranks", gathered)
    with pytest.raises(CheckpointError, match=says):
        loading.load(Reader(found), None, "full")
    assert len(told) == 1


def test_what_torchs_writer_raises_is_heard_although_it_is_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.new_group", lambda *_, **__: lambda: None)  # whatever can be referred to
    published: list[object] = []
    saving = BackgroundSave(published.append)
    failed: Future[object] = Future()
    failed.set_exception(CheckpointException("write", {}))
    monkeypatch.setattr(background, "async_save", lambda *_, **__: failed)
    saving.start(tmp_path / "step_6", {}, ("step_6", None, []))  # type: ignore[arg-type]
    assert isinstance(saving.wait(), CheckpointException)
    assert published == []
