"""The table of scenarios: a model on a mesh, the ranks that run out of memory in a step of it, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any, TypeAlias

import torch

from tests.distributed.faults.meshes import (
    LocalExperts,
    OnMesh,
    ValuesMatter,
    context_parallel,
    expert_parallel,
    masked_on_all_ranks,
    scaled,
    sharded,
    split_layers,
    tensor_parallel,
    torchtitan,
    tripled,
)
from tests.distributed.models import ModelConfig
from tests.recipes.ppo.rollouts import STAGES
from torchtune_adaptive.objectives.preference import POLICY, REFERENCE


@dataclass(frozen=True)
class RecipeStage:
    """The stage of a recipe for DPO or PPO that runs out of memory."""

    kind: str
    stage: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainerRun:
    """Training by transformers' Trainer, in which the ranks fail in turn."""

    sharded: bool = True


Model: TypeAlias = ModelConfig | OnMesh | RecipeStage | TrainerRun


@dataclass(frozen=True)
class Scenario:
    """A line of the table."""

    name: str
    model: Any
    """A `Model`."""
    _: KW_ONLY
    world_size: int = 2
    failing: tuple[int, ...] = (1,)
    rows: int = 2
    """Initial rows per microbatch; four samples are two microbatches of two rows."""
    samples: int = 4
    again: str = "never"
    """When a second failure occurs: "never", in the "retry" or in the "drain"."""
    first_pass: bool = False
    """Fail in the very first step of the model."""
    reduce_once: bool = False
    """Reduce-scatter gradients only in the last microbatch of a step, until a rank runs out of memory."""
    error: Callable[[str], Exception] = torch.OutOfMemoryError
    stride: int = 1
    """Step size of the exhaustive sweep; 1 tries every operation."""


def as_dtensor_does(what: str) -> Exception:
    """Return the error that DTensor raises if one of its operations fails."""
    error = RuntimeError(f"{what}\n\nSharding propagation failed for aten.mm.default")
    error.__cause__ = torch.OutOfMemoryError(what)
    return error


def as_a_driver_does(_: str) -> Exception:
    return RuntimeError("CUDA driver error: out of memory")


RETRY, DRAIN, FIRST, ONCE = {"again": "retry"}, {"again": "drain"}, {"first_pass": True}, {"reduce_once": True}
WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "rank 0 fails": {"failing": (0,)},
    "both ranks fail": {"failing": (0, 1)},
    "3 ranks, the last fails": {"world_size": 3, "failing": (2,)},
    "3 ranks, two fail": {"world_size": 3, "failing": (0, 2)},
    "4 ranks, two fail": {"world_size": 4, "failing": (1, 2)},
    "a rank of each replica fails": {"failing": (0, 3)},
    "both ranks of a replica fail": {"failing": (2, 3)},
    "one microbatch": {"rows": 4},
    "fails in the retry too": {"rows": 4, **RETRY},
    "fails in the drain too": {"rows": 4, **DRAIN},
    "first pass": FIRST,
    "first pass, both ranks fail": {"failing": (0, 1), **FIRST},
    "first pass, fails in the drain too": {"rows": 4, **FIRST, **DRAIN},
    "reduce once": ONCE,
    "reduce once, fails in the retry too": {"rows": 4, "samples": 8, **ONCE, **RETRY},
    "reduce once, fails in the drain too": {"samples": 6, **ONCE, **DRAIN},
    "error of DTensor": {"error": as_dtensor_does},
    "error of a driver": {"error": as_a_driver_does},
}


def lines(name: str, model: Model, strides: int | Mapping[str, int] = 1, **changes: Any) -> Iterator[Scenario]:
    """Yield a scenario for each way to fail, with its stride."""
    for way, stride in ({"": strides} if isinstance(strides, int) else strides).items():
        yield Scenario(", ".join(filter(None, (name, way))), model, **{**changes, **WAYS[way], "stride": stride})


LLAMA, LORA, JOINED = ModelConfig(), ModelConfig(lora=True), ModelConfig(joined=True, dropout=0.0)
HALF, CHUNKS, COMPILED = ModelConfig(bf16=True), ModelConfig(head_chunks=4), ModelConfig(compiled=True)
HYBRID, OFFLOADED, FROZEN = ModelConfig(replicas=2), ModelConfig(offload=True), ModelConfig(with_frozen_model=True)
WHOLE = ModelConfig(sharded=False)
IN_BUCKETS = replace(WHOLE, bucket_bytes=4096)
CHECKPOINTING, GATHERED = {"checkpointing": "full"}, {"reshard_after_forward": False}
IN_NODES: dict[str, Any] = {"world_size": 4}

FINETUNING = (
    lines(
        "plain",
        LLAMA,
        {
            **dict.fromkeys(("", "fails in the retry too", "fails in the drain too", "first pass", "reduce once"), 1),
            "rank 0 fails": 2,
            "both ranks fail": 3,
            "3 ranks, the last fails": 5,
            "3 ranks, two fail": 7,
            "first pass, fails in the drain too": 3,
            "first pass, both ranks fail": 5,
            "reduce once, fails in the retry too": 3,
            "reduce once, fails in the drain too": 3,
            "error of DTensor": 7,
            "error of a driver": 7,
        },
    ),
    lines("full checkpointing", replace(LLAMA, **CHECKPOINTING)),
    lines("selective checkpointing", replace(LLAMA, checkpointing="selective")),
    lines("compiled layers", COMPILED, {"": 2, "first pass": 3}),
    lines("no reshard after forward", replace(LLAMA, **GATHERED)),
    lines("one group", replace(LLAMA, grouped=True), 3),
    lines("head in chunks", CHUNKS, {"": 2, "first pass": 3, "fails in the drain too": 5, "reduce once": 3}),
    lines("lora", LORA, {"": 1, "reduce once": 3}),
    lines("lora, full checkpointing", replace(LORA, **CHECKPOINTING), 3),
    lines("bf16", HALF),
    lines("bf16, full checkpointing", replace(HALF, **CHECKPOINTING), {"": 3, "reduce once": 1}),
    lines("without padding", JOINED, dict.fromkeys(("", "fails in the drain too", "first pass"), 1)),
    lines("without padding, full checkpointing", replace(JOINED, **CHECKPOINTING)),
    lines("without padding, lora", replace(JOINED, lora=True)),
    lines("with a frozen model", FROZEN, {"": 1, "first pass": 3}),
    lines("with a frozen model, no reshard", replace(FROZEN, **GATHERED), 3),
    lines("offloaded", OFFLOADED, {"": 1, "fails in the drain too": 3, "first pass": 3, "reduce once": 3}),
    lines("offloaded, full checkpointing", replace(OFFLOADED, **CHECKPOINTING), 5),
    lines("offloaded, bf16", replace(OFFLOADED, bf16=True), 5),
    lines("whole", IN_BUCKETS, {"": 1, "both ranks fail": 7, "fails in the retry too": 7, "fails in the drain too": 7}),
    lines("whole, one bucket", WHOLE, {"3 ranks, two fail": 7, "first pass": 5}),
    lines("whole, lora, full checkpointing", replace(WHOLE, lora=True, **CHECKPOINTING, bucket_bytes=1024), 3),
)
IN_REPLICAS = (
    lines(
        "hybrid",
        HYBRID,
        {
            "": 1,
            "rank 0 fails": 3,
            "a rank of each replica fails": 3,
            "both ranks of a replica fail": 5,
            "one microbatch": 5,
            "fails in the retry too": 3,
            "first pass": 3,
        },
        **IN_NODES,
    ),
    lines("hybrid, 8 samples", HYBRID, {"fails in the drain too": 3}, samples=8, **IN_NODES),
    lines("hybrid, 8 samples", HYBRID, {"first pass, fails in the drain too": 5}, samples=8, failing=(2,), **IN_NODES),
    lines("hybrid, no reshard after forward", replace(HYBRID, **GATHERED), 5, **IN_NODES),
    lines("hybrid, one group", replace(HYBRID, grouped=True), 5, **IN_NODES),
    lines("hybrid, bf16", replace(HYBRID, bf16=True), 3, **IN_NODES),
    lines("hybrid, lora, full checkpointing", replace(HYBRID, lora=True, **CHECKPOINTING), 5, **IN_NODES),
    lines("hybrid, whole replicas", ModelConfig(replicas=4), 5, **IN_NODES),
    lines("hybrid, offloaded", replace(HYBRID, offload=True), 5, **IN_NODES),
    lines(
        "hybrid, head in chunks",
        replace(HYBRID, head_chunks=4),
        {"fails in the retry too": 7, "fails in the drain too": 11},
        **IN_NODES,
    ),
    lines("replicated", ModelConfig(replicated=True), {"": 5, "one microbatch": 5}, **IN_NODES),
)

TP, CP = OnMesh(tensor_parallel), OnMesh(context_parallel, exchanges_activations=True)
EP, EXPERTS = (
    OnMesh(expert_parallel, shared_by=1),
    OnMesh(partial(sharded, LocalExperts), shared_by=1, checkpointing=True, needs_values=True),
)
CHECKPOINTED_EP = replace(EP, checkpointing=True)
IN_BF16 = {"param_dtype": torch.bfloat16}
THREE_WAYS = {"both ranks fail": 7, "first pass": 5, "fails in the drain too": 3}


def custom(name: str, inside: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Scenario]:
    """Yield a scenario of a model under tensor parallelism with other code in it."""
    return lines(f"custom code, {name}", OnMesh(partial(split_layers, inside), needs_values=True))


COMPUTING = OnMesh(partial(sharded, ValuesMatter), shared_by=1, needs_values=True)
"""A failed rank computes with copies of its own shard in the first pass."""
ON_MESHES = (
    lines("tensor parallel", TP, {"": 1, "rank 0 fails": 5, "fails in the retry too": 5, **THREE_WAYS}),
    lines("tensor parallel, checkpointing", replace(TP, checkpointing=True), 3),
    lines("context parallel", CP, {"": 1, "4 ranks, two fail": 4}),
    lines("context parallel, compiled layers", replace(CP, compiled=True), 3),
    lines("expert parallel", EP, {"": 1, "3 ranks, the last fails": 4, **THREE_WAYS}),
    lines("expert parallel, checkpointing", CHECKPOINTED_EP, rows=4),
    lines(
        "expert parallel and sharded, checkpointing",
        replace(CHECKPOINTED_EP, experts_sharded_by=2, **IN_BF16),
        12,
        failing=(3,),
        rows=4,
        **IN_NODES,
    ),
    lines("sharded experts, checkpointing", EXPERTS, {"": 1, "first pass": 5}, rows=4),
    lines("sharded experts, checkpointing, bf16", replace(EXPERTS, **IN_BF16), 3, rows=4),
    lines("tensor parallel and sharded", TP, {"": 4, "first pass": 11}, failing=(3,), **IN_NODES),
    lines("tensor parallel and sharded", TP, {"a rank of each replica fails": 11}, **IN_NODES),
    lines("tensor parallel and sharded, checkpointing", replace(TP, checkpointing=True), 12, failing=(3,), **IN_NODES),
    lines("tensor parallel and replicas", replace(TP, replicas=2), 11, **IN_NODES),
    custom("communication in autograd", scaled),
    custom("operator with a fake implementation", tripled),
    custom("mask that ranks exchange", masked_on_all_ranks),
    lines("layers whose values matter", COMPUTING, {"first pass": 5}),
)

ON_PAIRS = ("full_dpo", "lora_dpo")
KINDS = {**dict.fromkeys(ON_PAIRS, (REFERENCE, POLICY)), "full_ppo": STAGES}


def stages() -> Iterator[Scenario]:
    """Yield a line for every stage of a recipe, then its variants, which try fewer operations."""
    ways = ("rank 0 fails", "both ranks fail", "fails in the retry too", "fails in the drain too", "first pass")
    gathered = ("fsdp_reshard_after_forward=False",)
    of_pairs: dict[str, dict[str, Any]] = {
        "no reshard from the first pass on": {"overrides": gathered, "first_pass": True},
        "without padding": {"overrides": ("adaptive.token_budget=1000", "adaptive.balance=False")},
        "full checkpointing": {"overrides": ("enable_activation_checkpointing=True",)},
        "two of three": WAYS["3 ranks, two fail"],
        "hybrid": {"overrides": ("data_parallel_replicate_dim=2",), "world_size": 4},
    }
    for kind, stages in KINDS.items():
        for stage in stages:
            model = RecipeStage(kind, stage)
            name = f"recipes, {kind}, {stage}"
            yield from lines(name, model, {"": 1, **dict.fromkeys(ways, 17)})
            for way, changes in {
                "no reshard": {"overrides": gathered},
                **(of_pairs if kind in ON_PAIRS else {}),
            }.items():
                other = replace(model, overrides=changes.get("overrides", ()))
                rest = {key: value for key, value in changes.items() if key != "overrides"}
                yield from lines(f"{name}, {way}", other, 17, **rest)


def of_torchtitan() -> Iterator[Scenario]:
    """Yield lines with torchtitan's models. It is not a dependency."""
    if not find_spec("torchtitan"):
        return
    llama, mixture = (OnMesh(partial(torchtitan, kind)) for kind in ("llama", "moe"))
    mixture = replace(mixture, shared_by=1)
    yield from lines("torchtitan llama", llama, {"": 1, "first pass": 11}, failing=(3,), **IN_NODES)
    yield from lines("torchtitan llama, checkpointing", replace(llama, checkpointing=True), failing=(3,), **IN_NODES)
    yield from lines("torchtitan mixture", mixture, {"": 1, "first pass": 5})
    yield from lines("torchtitan mixture, checkpointing", replace(mixture, checkpointing=True))


OF_TRAINER = (
    lines("Trainer, FSDP2", TrainerRun()),
    lines("Trainer, FSDP2, 3 ranks", TrainerRun(), 5, world_size=3),
    lines("Trainer, DDP", TrainerRun(sharded=False), 2),
)
SCENARIOS: dict[str, Scenario] = {
    each.name: each for each in chain(*FINETUNING, *IN_REPLICAS, *ON_MESHES, stages(), *OF_TRAINER, of_torchtitan())
}
"""By name."""
