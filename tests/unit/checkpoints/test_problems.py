"""Messages about failed checkpoints tell users how to react."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from torchtune_adaptive.checkpoints import loading, manager
from torchtune_adaptive.checkpoints.manager import describe_failure
from torchtune_adaptive.config.remedies import KEYS
from torchtune_adaptive.errors import CheckpointError


def test_oom_in_a_save_names_the_checkpoint_to_resume_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr(manager.THIS_RUN, "newest_checkpoint", None)

    def message() -> str:
        return manager.out_of_memory_in("epoch_0", torch.OutOfMemoryError()).in_words(KEYS)

    advice = "train on more ranks or raise adaptive.memory_limit if it is set"
    again = "the same command and resume_from_checkpoint=auto"
    assert message().endswith(f"there is no earlier checkpoint; once that is fixed, start over with {again}; {advice}")
    monkeypatch.setattr(manager.THIS_RUN, "newest_checkpoint", tmp_path)
    assert message().endswith(f"the last good one is {tmp_path}; once that is fixed, resume with {again}; {advice}")
    for error in (torch.OutOfMemoryError(), MemoryError()):
        assert describe_failure(error, tmp_path) == f"out of memory on rank 0: {advice}"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory while loading the weights on rank 1"),
        (MemoryError(), "out of memory while loading the weights on rank 1"),
        (ValueError("Unable to load"), "loading the weights failed on rank 1"),
    ],
)
def test_loading_error_on_one_rank_is_reported_on_all(
    monkeypatch: pytest.MonkeyPatch, found: object, expected: str
) -> None:
    message: list[object] = []

    def gathered(mine: object) -> list[object]:
        message.append(mine)
        return [(None, False), mine]

    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr(loading, "from_all_ranks", gathered)
    with pytest.raises(CheckpointError, match=expected):
        loading.load(mock.Mock(**{"load_checkpoint.side_effect": [found]}), None)
    assert len(message) == 1
