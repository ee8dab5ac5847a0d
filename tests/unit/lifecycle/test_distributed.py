"""Devices, meshes, and ranks started with different configs."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.ranks import on_ranks
from tests.unit.data.minimal_config import NEEDED
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.lifecycle.distributed import check_same_config, device_of, mesh_shape


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(("local_rank", "reason"), [("0", "torch found only cpu"), ("63", "The local rank")])
def test_missing_gpu_is_an_error(local_rank: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(ConfigError, match=rf"this machine does not have \({reason}.*set device: cpu"):
        device_of(replace(Settings(**NEEDED), device="cuda"))


degrees = st.sampled_from([1, 2, 4, 8])


@given(st.integers(1, 16), degrees, degrees, st.none() | st.just(-1) | degrees)
def test_mesh_has_all_ranks_or_the_error_names_the_dimensions(
    ranks: int, replicas: int, tensor_parallel: int, shards: int | None
) -> None:
    """Without a number of shards, they are the remaining ranks."""
    dims = {"data_parallel_replicate_dim": replicas, "tensor_parallel_dim": tensor_parallel}
    settings, others = Settings(**NEEDED, **dims, data_parallel_shard_dim=shards), replicas * tensor_parallel
    if ranks % others == 0 and shards in (None, -1, ranks // others):
        assert mesh_shape(settings, ranks) == (replicas, ranks // others, tensor_parallel)
        return
    with pytest.raises(ConfigError, match=f"world size, which is {ranks}") as raised:
        mesh_shape(settings, ranks)
    dims["data_parallel_shard_dim"] = shards or -1
    assert all(f"{key} {dim}" in str(raised.value) for key, dim in dims.items())


CONFIG = {
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.003},
    "epochs": 1,
    "output_dir": "/disk/run",
    "metric_logger": {"name": "run"},
    "adaptive": {"memory_limit": None, "regrow_after": 120},
}


DIFFERENT: dict[str, tuple[tuple[str, ...], str]] = {
    "a number": (("optimizer.lr=0.01",), "optimizer.lr is 0.003 on rank 0 and 0.01 on rank 1"),
    "null": (("adaptive.regrow_after=null",), "regrow_after is 120 on rank 0 and null on rank 1"),
    "a key on one rank only": (("shuffle=False",), "shuffle is null on rank 0 and False on rank 1"),
    "a dataset on the hub": (("dataset.source=org/one",), "dataset.source is null on rank 0 and 'org/one' on rank 1"),
    "in a list": (("stop_token_ids=[1]",), "stop_token_ids[0] is null on rank 0 and 1 on rank 1"),
    "many": (("a=1", "b=1"), "a is null on rank 0 and 1 on rank 1"),
}
ALIKE: dict[str, tuple[str, ...]] = {
    "of a node": ("output_dir=/scratch/run", "metric_logger.name=node1", "adaptive.memory_limit=8GiB"),
    "paths": ("checkpointer.checkpoint_files=[a.bin,b.bin]", "dataset.source=/disk1/data", "tokenizer.path=mine"),
    "a null on one rank only": ("max_steps_per_epoch=null",),
}


def error_on_rank_1(*overrides: str) -> str:
    """Collective: change these keys on rank 1; return the error on this rank."""
    mine = overrides if dist.get_rank() == 1 else ()
    cfg = OmegaConf.merge(OmegaConf.create(CONFIG), OmegaConf.from_dotlist(list(mine)))
    assert OmegaConf.is_dict(cfg)
    try:
        check_same_config(cfg)
    except ConfigError as error:
        return str(error)
    return ""


@on_ranks(3)
def test_different_values_are_named_on_every_rank_except_allowed_ones() -> None:
    for name, (overrides, message) in DIFFERENT.items():
        assert message in error_on_rank_1(*overrides), name
    for name, overrides in ALIKE.items():
        assert error_on_rank_1(*overrides) == "", name
