"""Ranks that do not see rank 0's files: all ranks get an error, and no rank waits."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from tests.ranks import run_on_ranks
from tests.unit.checkpoints.run_starts import config
from torchtune_adaptive.checkpoints.loading import load_distributed
from torchtune_adaptive.checkpoints.resuming import find_start
from torchtune_adaptive.config.checks import read_full_settings
from torchtune_adaptive.errors import CheckpointError, ConfigError


def start_on_a_separate_disk(folder: Path) -> str:
    own = folder / f"disk_{dist.get_rank()}"
    (own / ".saving").mkdir(parents=True)  # left by an earlier run
    with pytest.raises(ConfigError) as error:
        find_start(read_full_settings(config(own)), "full")
    return str(error.value)


def test_unshared_disk_is_detected_even_after_an_earlier_run(tmp_path: Path) -> None:
    for message in run_on_ranks(2, start_on_a_separate_disk, tmp_path):
        assert "is not shared by all nodes: rank 1 does not see rank 0's" in message


def start_without_a_checkpointer(folder: Path) -> str:
    cfg = config(folder)
    settings = read_full_settings(cfg)
    del cfg.checkpointer
    with pytest.raises(ConfigError) as error:
        find_start(replace(settings, config=cfg), "full")
    return str(error.value)


def test_missing_checkpointer_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, start_without_a_checkpointer, tmp_path, timeout_s=30)
    assert first == second
    assert "checkpointer" in first


def load_from_a_separate_disk(folder: Path) -> str:
    own = folder / f"disk_{dist.get_rank()}"
    own.mkdir()
    if dist.get_rank() == 0:
        (own / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={})))
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError) as error:
        load_distributed(own, model, torch.optim.SGD(model.parameters(), lr=0.1), dist.new_group(backend="gloo"))
    return str(error.value)


def test_rank_that_cannot_read_a_distributed_checkpoint_leaves_no_rank_waiting(tmp_path: Path) -> None:
    for message in run_on_ranks(2, load_from_a_separate_disk, tmp_path, timeout_s=30):
        assert "loading checkpoint" in message
        assert "failed on rank 1" in message
