"""Contents of a checkpoint: finite weights, gathered like torchtune's."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchtune import training
from torchtune.modules.peft import LoRALinear

from tests.ranks import on_ranks, run_on_ranks
from torchtune_adaptive.checkpoints import contents
from torchtune_adaptive.checkpoints.contents import Contents, gather_optimizer_state, gather_weights, weights_are_finite
from torchtune_adaptive.engine.messages import Listener
from torchtune_adaptive.engine.ranks import full_tensor

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
