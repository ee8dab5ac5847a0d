"""What is put in the place of torchtune's, torchao's and FSDP's own, against what it stands for."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4

from torchtune_adaptive.memory.device import plain_tensors
from torchtune_adaptive.tune.trace.shims import own_shard, quantizing_at_once, rank_0_of, without_garbage_collection


def parts(weight: NF4Tensor) -> list[tuple[torch.dtype, torch.Size]]:
    return [(part.dtype, part.shape) for part in plain_tensors(weight)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_quantized_at_once_have_the_parts_of_quantized_weights(dtype: torch.dtype) -> None:
    weight = torch.randn(512, 256, dtype=dtype)
    with quantizing_at_once():
        at_once = to_nf4(weight)
    assert parts(at_once) == parts(to_nf4(weight))
    assert len(parts(at_once)) == 5


@pytest.mark.parametrize(("ranks", "shape"), [(2, (4, 3)), (3, (8,)), (8, (5, 2)), (4, (4, 4, 2))])
def test_the_shard_of_rank_0_is_what_it_would_keep_of_all_shards(ranks: int, shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape)
    with rank_0_of(ranks):
        mesh = init_device_mesh("cpu", (ranks,))
        own, distributed = own_shard(whole, mesh, [Shard(0)]), distribute_tensor(whole, mesh, [Shard(0)])
        assert own.to_local().shape == distributed.to_local().shape
        assert (own.shape, own.stride(), own.placements) == (whole.shape, whole.stride(), distributed.placements)


@pytest.mark.parametrize("frozen_before", [False, True])
def test_garbage_is_looked_for_afterwards_where_it_was_before(frozen_before: bool) -> None:
    gc.unfreeze()
    if frozen_before:
        gc.freeze()
    with without_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert (gc.get_freeze_count() > 0) == frozen_before
    gc.freeze()
