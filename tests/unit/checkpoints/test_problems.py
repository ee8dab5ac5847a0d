"""Messages about failed checkpoints tell users how to react."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from torchtune_adaptive.checkpoints import manager
from torchtune_adaptive.checkpoints.manager import describe_failure
from torchtune_adaptive.config.keys import REMEDIES
from torchtune_adaptive.errors import CheckpointError


def test_oom_in_the_first_save_advises_to_start_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr(manager.THIS_RUN, "newest_checkpoint", None)
    message = manager.out_of_memory_in("epoch_0", torch.OutOfMemoryError()).in_words(REMEDIES)
    advice = "train on more ranks or raise adaptive.memory_limit if it is set"
    assert message.endswith(f"start over with the same command and resume_from_checkpoint=auto; {advice}")
    for error in (torch.OutOfMemoryError(), MemoryError()):
        assert describe_failure(error, tmp_path) == f"out of memory on rank 0: {advice}"


@pytest.mark.parametrize(
    ("found", "out_of_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (ValueError("Unable to load"), False),
    ],
)
def test_loading_error_on_one_rank_is_reported_on_all(
    monkeypatch: pytest.MonkeyPatch, found: Exception, out_of_memory: bool
) -> None:
    gathered: list[Any] = []
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr(manager, "from_all_ranks", lambda mine: gathered.append(mine) or [(None, False), mine])
    with pytest.raises(CheckpointError, match="rank 1") as error:
        manager.load_on_all_ranks(mock.Mock(side_effect=[found]), "the weights")
    assert len(gathered) == 1
    assert ("out of memory" in error.value.fact) == out_of_memory
