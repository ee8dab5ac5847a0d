"""Data that ranks exchange (positions, loads, checksums), and errors of failed collectives."""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.ranks import on_ranks
from tests.recipes.allocation_profile import profiled
from torchtune_adaptive.engine.consistency import checksum
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.ranks import comes_from_a_collective, explaining_failures, full_tensor
from torchtune_adaptive.engine.results import AttemptReport, AttemptReports
from torchtune_adaptive.errors import Remedy, UnrecoverableError

OUT_OF_MEMORY = (
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)
PEER_EXITED = "NCCL AllGather failed: remote process exited or there was a network error \nNCCL Last Error: socketPoll"
NCCL_ERRORS = (dist.DistBackendError, RuntimeError)
"""Of both classes of process groups."""
GLOO = "[/pytorch/gloo/pair.cc:545] Read error [::1]:4: Connection reset. This may indicate"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (dist.DistBackendError(OUT_OF_MEMORY), "an FSDP collective failed on rank 0 (?s:.*) communicator is broken"),
        *((kind(PEER_EXITED), r"another rank .* there was a network error\)") for kind in NCCL_ERRORS),
        (RuntimeError(GLOO), r"another rank .*on rank 0: Read error \[::1\]:4: Connection reset\)"),
    ],
    ids=["out of memory", "NCCL", "NCCL, C++", "gloo"],
)
def test_failed_collective_names_its_cause_without_details_of_the_backend(error: Exception, says: str) -> None:
    assert comes_from_a_collective(error)
    with pytest.raises(UnrecoverableError, match=says) as raised, explaining_failures("an FSDP collective"):
        raise error
    assert raised.value.__cause__ is error
    assert raised.value.remedies == ((Remedy.ROOM_FOR_NCCL,) if "Cuda failure" in str(error) else ())


def test_error_that_only_mentions_nccl_is_not_of_a_collective() -> None:
    assert not comes_from_a_collective(ValueError("NCCL is not installed"))


def test_oom_before_a_collective_is_not_converted():
    with pytest.raises(torch.OutOfMemoryError), explaining_failures("an FSDP collective"):
        raise torch.OutOfMemoryError


@given(st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=9), min_size=1, max_size=9), st.booleans())
def test_imbalance_is_the_largest_cost_of_a_rank_divided_by_the_mean(ranks: list[list[int]], padded: bool) -> None:
    """Each rank has its samples in one microbatch; attention costs the square of a length."""
    costs = [sum((max(lengths) if padded else each) ** 2 for each in lengths) for lengths in ranks]
    kind: SampleKind[int] = SampleKind(
        length_of=int, filler=int, padded=padded, cost_of=lambda length: 1e-6 * length**2
    )
    loads = [kind.load((tuple(range(len(lengths))),), lengths, lengths) for lengths in ranks]
    imbalance = AttemptReports(AttemptReport(load=load) for load in loads).imbalance
    assert imbalance == pytest.approx(max(costs) / statistics.mean(costs))
    assert (imbalance == 1) == (len({*costs}) == 1)
    for equal in (loads[0], AttemptReport().load):
        assert AttemptReports([AttemptReport(load=equal)] * 49).imbalance == 1, "exactly, and also without work"


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one bit": lambda tensor: tensor + torch.eye(20, 30, dtype=tensor.dtype) * 2**-7,
    "the first two rows swapped": lambda tensor: tensor[[1, 0, *range(2, 20)]],
    "the last two columns swapped": lambda tensor: tensor[:, [*range(28), 29, 28]],
    "minus zero": lambda tensor: torch.where(tensor == tensor.max(), -0.0, tensor),
    "NaN": lambda tensor: torch.where(tensor == tensor.max(), torch.nan, tensor),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("change", CHANGES)
def test_different_weights_have_different_checksums(change: str, dtype: torch.dtype) -> None:
    weights = torch.randn(20, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed = CHANGES[change](weights.clone())
    assert checksum([weights]) == checksum([weights.clone(), torch.zeros(0)])
    assert checksum([weights]) != checksum([changed])
    assert checksum([weights, changed]) != checksum([changed, weights])


def test_checksum_does_not_copy_the_weights() -> None:
    weights = torch.randn(4_000_000).to(torch.bfloat16)
    assert profiled(lambda: checksum([weights])).peak_bytes < 10 * 2**20


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((2,), [Shard(0)]),
        ((3,), [Shard(0)]),
        ((3,), [Shard(1)]),
        ((2, 1), [Replicate(), Shard(0)]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ],
    ids=str,
)
@on_ranks(lambda mesh_shape, **_: math.prod(mesh_shape))
def test_full_tensor_is_torchs(mesh_shape: tuple[int, ...], placements: list[Any]) -> None:
    """Shards are uneven or empty."""
    mesh = init_device_mesh("cpu", mesh_shape)
    for shape, dtype in itertools.product([(7, 5), (1, 9), (8, 2)], [torch.float32, torch.bfloat16, torch.int64]):
        whole = torch.arange(math.prod(shape)).view(shape).to(dtype)
        sharded = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim).redistribute(mesh, placements)
        torchs = sharded.full_tensor()
        ours = full_tensor(sharded)
        assert ours.dtype == torchs.dtype
        assert torch.equal(ours, torchs)
        assert torch.equal(ours, whole)
