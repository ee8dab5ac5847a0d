"""Ranks that do not see rank 0's files: all ranks get an error, and no rank waits."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.unit.checkpoints.test_resuming import config
from torchtune_adaptive.checkpoints.resuming import find_start
from torchtune_adaptive.config.checks import read_full_settings
from torchtune_adaptive.errors import ConfigError


def start_on_a_separate_disk(folder: Path) -> str:
    own = folder / f"disk_{dist.get_rank()}"
    (own / ".saving").mkdir(parents=True)  # left by an earlier run
    with pytest.raises(ConfigError) as error:
        find_start(read_full_settings(config(own)), "full")
    return str(error.value)


def test_unshared_disk_is_detected_even_after_an_earlier_run(tmp_path: Path) -> None:
    for message in run_on_ranks(2, start_on_a_separate_disk, tmp_path):
        assert "is not shared by all nodes: rank 1 does not see rank 0's" in message
