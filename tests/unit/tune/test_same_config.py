"""Ranks that were started with different configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from tests.ranks import run_on_ranks
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.same_config import check_same_config

CONFIG = {
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.003},
    "epochs": 1,
    "output_dir": "/disk/run",
    "metric_logger": {"name": "run"},
    "adaptive": {"memory_limit": None, "silent_rank_timeout": 120},
}


def compare(*overrides: str) -> str | None:
    """Collective: rank 1 has these; what is said there."""
    mine = overrides if dist.get_rank() == 1 else ()
    cfg = OmegaConf.merge(OmegaConf.create(CONFIG), OmegaConf.from_dotlist(list(mine)))
    assert OmegaConf.is_dict(cfg)
    try:
        check_same_config(cfg)
    except ConfigError as error:
        return str(error)
    return None


DIFFERENT: dict[str, tuple[tuple[str, ...], str]] = {
    "a number": (
        ("optimizer.lr=0.01",),
        "optimizer.lr is 0.003 on rank 0 and 0.01 on rank 1: start all",
    ),
    "null": (
        ("adaptive.silent_rank_timeout=null",),
        "silent_rank_timeout is 120 on rank 0 and null on rank 1",
    ),
    "a key that only one has": (("shuffle=False",), "shuffle is null on rank 0 and False on rank 1"),
    "a dataset on the hub": (("dataset.source=org/one",), "dataset.source is null on rank 0 and 'org/one' on rank 1"),
    "in a list": (("stop_token_ids=[1]",), "stop_token_ids[0] is null on rank 0 and 1 on rank 1"),
    "many": (("a=1", "b=1", "c=1", "d=1"), "c is null on rank 0 and 1 on rank 1 (and 1 more): start all"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_values_that_differ_are_named_on_every_rank(name: str) -> None:
    overrides, said = DIFFERENT[name]
    found: list[Any] = run_on_ranks(3, compare, *overrides)
    assert found[0] == found[1] == found[2]
    assert said in found[0]


def test_paths_and_what_a_node_has_of_its_own_may_differ() -> None:
    own = ("output_dir=/scratch/run", "metric_logger.name=node1", "adaptive.memory_limit=8GiB")
    files = ("checkpointer.checkpoint_files=[a.bin,b.bin]", "dataset.source=/disk1/data", "tokenizer.path=mine")
    assert run_on_ranks(2, compare, *own, *files) == [None, None]


def test_values_that_mean_the_same_may_be_written_differently() -> None:
    assert run_on_ranks(2, compare, "epochs=1.0", "max_steps_per_epoch=null") == [None, None]
