"""What ranks tell each other before a checkpoint: weights that are NaN are not worth one, nor is one that a rank cannot
make room for."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchtune import training
from torchtune.modules.peft import LoRALinear

from tests.ranks import RankFailed, run_on_ranks
from torchtune_adaptive.checkpoints.contents import (
    FullContents,
    LoraContents,
    gather_weights,
    make_ready,
    make_room_to_gather,
)
from torchtune_adaptive.engine.meter import MemoryMeter

CPU = torch.device("cpu")
LORA = {"rank": 2, "alpha": 4.0}


def nothing() -> None: ...


def verdicts(bad: float, folder: Path) -> list[bool]:
    model = nn.Linear(2, 2)
    frozen = nn.Parameter(torch.full((1,), bad), requires_grad=False)
    model.register_parameter("frozen", frozen)
    found = [make_ready(model, nothing, folder)[1].finite]
    if dist.get_rank() == 1:
        model.weight.data[0, 0] = bad
    return [*found, make_ready(model, nothing, folder)[1].finite]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_rank_with_a_weight_that_is_not_finite_is_enough(bad: float, tmp_path: Path) -> None:
    assert run_on_ranks(2, verdicts, bad, tmp_path, timeout_s=60) == [[True, False]] * 2


def with_so_much_room(folder: Path, failing: int, bytes_left: int) -> tuple[str | None, int]:
    """Collective: the weight has 1,024 bytes, of which each rank has half."""
    model = nn.Linear(16, 16, bias=False)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def prepare() -> None:
        with MemoryMeter(bytes_left if dist.get_rank() == failing else None):
            make_room_to_gather(FullContents().sharded(model), optimizer, CPU)

    ready = make_ready(model, prepare, folder)[1]
    return ready.problem, len(ready.random_states)


def with_room_for(failing: int, bytes_left: int) -> None:
    """Two weights of 1,024 bytes."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(2)))
    fully_shard(model)
    with MemoryMeter(bytes_left if dist.get_rank() == failing else None):
        make_room_to_gather(FullContents().sharded(model), torch.optim.SGD(model.parameters(), lr=0.1), CPU)


def test_where_the_device_is_the_host_rank_0_needs_room_for_all_of_it() -> None:
    run_on_ranks(2, with_room_for, 1, 2_100, timeout_s=60)
    run_on_ranks(2, with_room_for, 0, 3_100, timeout_s=60)
    with pytest.raises(RankFailed, match="OutOfMemoryError"):
        run_on_ranks(2, with_room_for, 0, 3_000, timeout_s=60)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_has_no_room_to_gather_is_known_to_all_before(failing: int, tmp_path: Path) -> None:
    """It needs the weight twice: as it arrives, and put together."""
    for problem, states in run_on_ranks(2, with_so_much_room, tmp_path, failing, 2_000, timeout_s=60):
        assert problem is not None
        assert f"out of memory on rank {failing}" in problem
        assert states == 2
    told = run_on_ranks(2, with_so_much_room, tmp_path, failing, 2_100, timeout_s=60)
    assert told == [(None, 2)] * 2


def adapted(*, quantized: bool = False, offloaded: bool = False) -> nn.Module:
    """Collective: a layer of each kind, shards of unequal size, and a weight and a buffer that are not sharded."""
    torch.manual_seed(0)
    model = nn.Sequential(LoRALinear(128, 256, **LORA, quantize_base=quantized), nn.Linear(256, 3))
    model[0].weight.requires_grad_(False)
    for layer in model:
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False) if offloaded else OffloadPolicy())
    model.register_parameter("whole", nn.Parameter(torch.ones(2)))
    model.register_buffer("counted", torch.arange(3))
    return model


def as_by_torchtune(options: dict[str, bool]) -> set[str]:
    """Collective: the names of what is gathered, each weight to the bit as torchtune gathers it."""
    model = adapted(**options)
    theirs = training.gather_cpu_state_dict(model, dist.get_rank() == 0, device=CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(dist, "barrier")
        ours = gather_weights(FullContents().sharded(model), CPU)[training.MODEL_KEY]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)
    return set(ours)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (3, {}), (1, {"quantized": True}), (2, {"quantized": True}), (3, {"offloaded": True})],
    ids=str,
)
def test_weights_are_gathered_as_by_torchtune(ranks: int, options: dict[str, bool]) -> None:
    names, *elsewhere = run_on_ranks(ranks, as_by_torchtune, options, timeout_s=60)
    assert names > {"whole", "counted", "0.weight", "0.lora_a.weight"}
    assert elsewhere == [set()] * (ranks - 1)


def sent_for(adapter_only: bool) -> tuple[set[str], list[tuple[int, ...]]]:
    """Collective: the names of what is saved on rank 0, and the shapes that were gathered for it."""
    model, shapes, gather = adapted(), list[tuple[int, ...]](), DTensor.full_tensor

    def noting(weight: DTensor) -> torch.Tensor:
        shapes.append(tuple(weight.shape))
        return gather(weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", noting)
        sharded = LoraContents(None, adapter_only).sharded(model)  # type: ignore[arg-type]
        return set(gather_weights(sharded, CPU)[training.MODEL_KEY]), shapes


def test_a_checkpoint_of_the_adapter_gathers_nothing_else() -> None:
    adapter = {"0.lora_a.weight", "0.lora_b.weight"}
    (names, shapes), (elsewhere, other_shapes) = run_on_ranks(2, sent_for, True, timeout_s=60)
    assert (names, elsewhere, shapes, other_shapes) == (adapter, set(), [(2, 128), (256, 2)], [(2, 128), (256, 2)])
    (names, shapes), _ = run_on_ranks(2, sent_for, False, timeout_s=60)
    assert names > adapter | {"0.weight", "1.weight"}
    assert len(shapes) == 5


def room_for_an_adapter(bytes_left: int) -> list[bool]:
    """Collective: whether there is room to gather the adapter, which has 3 KiB, and the model around it with 131."""
    model, enough = adapted(), []
    optimizer = torch.optim.SGD((each for each in model.parameters() if each.requires_grad), lr=0.1)
    for adapter_only in (True, False):
        with MemoryMeter(bytes_left), suppress(torch.OutOfMemoryError):
            make_room_to_gather(LoraContents(None, adapter_only).sharded(model), optimizer, CPU)  # type: ignore[arg-type]
            enough.append(adapter_only)
    return enough


def test_a_checkpoint_of_the_adapter_needs_no_room_for_more() -> None:
    assert run_on_ranks(2, room_for_an_adapter, 8_192, timeout_s=60) == [[True], [True]]
