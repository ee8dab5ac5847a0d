"""Contents of a checkpoint: finite weights, gathered like torchtune's. Messages about failed saves and loads."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchtune import training
from torchtune.modules.peft import LoRALinear

from tests.ranks import on_ranks, run_on_ranks
from torchtune_adaptive.checkpoints import contents, manager
from torchtune_adaptive.checkpoints.contents import Contents, gather_optimizer_state, gather_weights, weights_are_finite
from torchtune_adaptive.checkpoints.manager import describe_failure
from torchtune_adaptive.config.keys import REMEDIES
from torchtune_adaptive.engine.messages import Listener
from torchtune_adaptive.engine.ranks import full_tensor
from torchtune_adaptive.errors import CheckpointError

CPU = torch.device("cpu")
LORA = {"rank": 2, "alpha": 4.0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_trained_weight_must_be_finite_but_a_frozen_one_need_not(bad: float) -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("frozen", nn.Parameter(torch.full((1,), bad), requires_grad=False))
    assert weights_are_finite(model)
    model.weight.data[0, 0] = bad
    assert not weights_are_finite(model)


def adapted(*, quantized: bool = False, offloaded: bool = False) -> nn.Module:
    """Collective: build a layer of each kind, with shards of unequal size, and an unsharded weight and buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(LoRALinear(128, 256, **LORA, quantize_base=quantized), nn.Linear(256, 3))
    model[0].weight.requires_grad_(False)
    for layer in model:
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False) if offloaded else OffloadPolicy())
    model.register_parameter("whole", nn.Parameter(torch.ones(2)))
    model.register_buffer("counted", torch.arange(3))
    return model


def as_by_torchtune(options: dict[str, bool]) -> set[str]:
    """Collective: compare every gathered weight bitwise with torchtune's; return their names."""
    model = adapted(**options)
    theirs = training.gather_cpu_state_dict(model, dist.get_rank() == 0, device=CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(dist, "barrier")
        ours = gather_weights(Contents().sharded(model), CPU)[training.MODEL_KEY]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in theirs)
    return set(ours)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (3, {}), (1, {"quantized": True}), (2, {"quantized": True}), (3, {"offloaded": True})],
    ids=str,
)
def test_gathered_weights_equal_torchtunes(ranks: int, options: dict[str, bool]) -> None:
    names, *elsewhere = run_on_ranks(ranks, as_by_torchtune, options, timeout_s=60)
    assert names > {"whole", "counted", "0.weight", "0.lora_a.weight"}
    assert elsewhere == [set()] * (ranks - 1)


def sent_for(adapter_only: bool) -> tuple[set[str], list[tuple[int, ...]]]:
    """Collective: return the names saved on rank 0, and the shapes gathered for them."""
    model, shapes = adapted(), list[tuple[int, ...]]()

    def noting(weight: DTensor) -> torch.Tensor:
        shapes.append(tuple(weight.shape))
        return full_tensor(weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "full_tensor", noting)
        sharded = Contents(adapter_only=adapter_only).sharded(model)
        return set(gather_weights(sharded, CPU)[training.MODEL_KEY]), shapes


def test_adapter_checkpoint_gathers_only_the_adapter() -> None:
    adapter = {"0.lora_a.weight", "0.lora_b.weight"}
    (names, shapes), (elsewhere, other_shapes) = run_on_ranks(2, sent_for, True, timeout_s=60)
    assert (names, elsewhere, shapes, other_shapes) == (adapter, set(), [(2, 128), (256, 2)], [(2, 128), (256, 2)])
    (names, shapes), _ = run_on_ranks(2, sent_for, False, timeout_s=60)
    assert names > adapter | {"0.weight", "1.weight"}
    assert len(shapes) == 5


@on_ranks(2)
def test_save_issues_no_collective_that_corrupts_gloos_memory() -> None:
    """gloo's names of functional gathers are too long, see `engine.ranks.full_tensor`."""
    model, found = adapted(), set[str]()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Listener(lambda operation: found.add(operation.partition(" at ")[0])):
        gather_weights(Contents().sharded(model), CPU)
        gather_optimizer_state(model, optimizer, CPU)
    assert found <= {"c10d::_allgather_base_", "c10d::allgather_", "c10d::gather_"}


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
