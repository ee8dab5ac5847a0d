"""A tiny Llama, sharded the way torchtune's recipes shard it, and batches for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchtune import modules, training
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from torchtune.training.activations import apply_selective_activation_checkpointing

from torchtune_adaptive.data.unpadded import allowing_long_rows, support_documents, targets_of
from torchtune_adaptive.data.unpadded import concatenated as join
from torchtune_adaptive.engine import buckets
from torchtune_adaptive.engine.limits import Limit, RowLimit
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.objectives.finetuning import logits_only_for

VOCABULARY = 64

Gradients = dict[str, Tensor | None]
ForwardBackward: TypeAlias = Callable[[Sequence[Tensor]], Totals]
Parts: TypeAlias = tuple[list[nn.Module], ForwardBackward]
"""The trained model, other models whose collectives count, and the pass over a microbatch."""

_device = torch.device("cpu")


def device() -> torch.device:
    """Return the device of models: the CPU, unless `use_gpu` was called."""
    return _device


def computes() -> bool:
    """Return False on a null device, which runs no kernels."""
    return _device.type == "cpu" or not torch.cuda.get_device_name(_device).startswith("null device")


def use_gpu() -> None:
    """From here on, in this process, build models on a GPU or null device; ranks share GPUs if there are too few."""
    global _device
    _device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(_device)


@dataclass(frozen=True)
class ModelConfig:
    """Options that change what FSDP communicates and what autograd keeps."""

    layers: int = 2
    dim: int = 32
    dropout: float = 0.1
    checkpointing: str = "none"
    """"none", "full" or "selective"."""
    reshard_after_forward: bool = True
    lora: bool = False
    bf16: bool = False
    compiled: bool = False
    """Compile each layer."""
    sharded: bool = True
    joined: bool = False
    """Samples packed into one row without padding."""
    replicas: int = 1
    """Number of replicas of the sharded model; more than one is hybrid sharding."""
    offload: bool = False
    """Keep shards and gradients on the host and copy them to the device and back (here from memory to memory)."""
    head_chunks: int = 0
    """Number of chunks for which the head, in its own FSDP group, is gathered in turn; 0 for all at once."""
    replicated: bool = False
    """Replicas of the whole model, by torch's `replicate`."""
    grouped: bool = False
    """Shard the last layer, norm and head as one group, as torchtitan does with norm and output."""
    bucket_bytes: int | None = None
    """The size of the buckets of a whole model."""
    with_frozen_model: bool = False
    """Call a frozen model in each microbatch too, so that collectives of two models interleave."""

    clips = True
    """Norms are compared, too."""
    exchanges_activations = False
    """True if parameters do not show that ranks exchange activations."""

    def samples(self, count: int) -> list[Tensor]:
        """Return samples of this rank."""
        return samples_of(dist.get_rank(), count)

    def parts(self) -> Parts:
        """Collective: build the models."""
        if self.bucket_bytes is not None:
            buckets.FIRST_BYTES = buckets.MOST_BYTES = self.bucket_bytes
        models = [build(self)]
        train = forward_backward_of(models[0], joined=self.joined)
        if not self.with_frozen_model:
            return models, train
        models.append(frozen(build(replace(self, layers=1))))

        def both(samples: Sequence[Tensor]) -> Totals:
            """Add the output of the frozen model to the loss, as a constant."""
            with torch.no_grad():
                asked = models[1](nn.utils.rnn.pad_sequence(list(samples), batch_first=True).to(device())).mean()
            totals = train(samples)
            return totals._replace(loss_sum=totals.loss_sum + asked)

        return models, both


def build(config: ModelConfig) -> nn.Module:
    """Build the same model on every rank."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "num_layers": config.layers,
        "num_heads": 4,
        "num_kv_heads": 2,
        "embed_dim": config.dim,
        "max_seq_len": 64,
        "attn_dropout": config.dropout,
    }
    if config.lora:
        model = lora_llama3(lora_attn_modules=["q_proj", "v_proj"], lora_rank=4, lora_alpha=8, **shape)
        set_trainable_params(model, get_adapter_params(model))
    else:
        model = llama3(**shape)
    model.num_output_chunks = config.head_chunks
    support_documents(model)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.05)
    model = model if config.offload else model.to(device())
    if config.checkpointing == "full":
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    elif config.checkpointing == "selective":
        apply_selective_activation_checkpointing(model, "selective", 2)
    for layer in model.layers if config.compiled else ():
        layer.compile(backend="aot_eager")
    return shard(model.train(), config) if config.sharded else model.train()


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False).eval()


def shard(model: nn.Module, config: ModelConfig) -> nn.Module:
    """Shard like training.shard_model, which cannot pass on a mixed precision policy."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if config.bf16 else MixedPrecisionPolicy()
    options = {"reshard_after_forward": config.reshard_after_forward, "mp_policy": policy}
    if config.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if device().type == "cpu":
            copy_offloaded_tensors()
    if config.replicated:
        mesh = init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("replicate",))
        for module in (*model.layers, model):
            replicate(module, mesh=mesh)
        return model
    mesh = mesh_of(config.replicas)
    last = model.layers[-1]
    if config.grouped:
        fully_shard([last, model.norm, model.output], mesh=mesh, **options)
    alone = ["output"] if config.head_chunks else []
    for name, module in reversed(list(model.named_modules())):
        if name == "" or (
            training.get_shard_conditions(name, module, alone) and not (config.grouped and module is last)
        ):
            fully_shard(module, mesh=mesh, **options)
    return model


_to = Tensor.to


def copy_offloaded_tensors() -> None:
    """From here on, in this process, copy what FSDP moves between host and device, as a real device would.

    Host and device are the same here. `cpu` and `cpu:0` do not distinguish them: a real tensor on `cpu:0` reports
    `cpu`. Moves by FSDP are recognized by `non_blocking`, which only FSDP passes.
    """

    def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        moved = _to(tensor, *args, **options)
        return moved.clone() if moved is tensor and "non_blocking" in options else moved

    Tensor.to = to


@cache  # meshes keep their groups forever
def mesh_of(replicas: int = 1) -> DeviceMesh:
    """Collective: return a mesh of all ranks in one or two dimensions."""
    ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device().type, (ranks,))
    return init_device_mesh(device().type, (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))


def samples_of(rank: int, count: int) -> list[Tensor]:
    """Return token sequences of 4 to 8 tokens, different on every rank."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(4, 9, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


def batch_of(samples: Sequence[Tensor]) -> tuple[Tensor, Tensor, int]:
    """Return padded tokens, the next token of each, and the number of those that are not padding."""
    tokens = nn.utils.rnn.pad_sequence([*samples], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([*samples], batch_first=True, padding_value=-100)
    labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    return tokens.to(device()), labels.to(device()), int((labels != -100).sum())


def forward_backward_of(model: nn.Module, *, joined: bool = False) -> Callable[[Sequence[Tensor]], Totals]:
    """Return the function that a recipe passes to StepRunner: next-token loss, summed over target tokens."""
    if joined:
        return partial(_joined_forward_backward, model)

    def forward_backward(samples: Sequence[Tensor]) -> Totals:
        tokens, labels, target_tokens = batch_of(samples)
        with logits_only_for(
            model, partial(_filled_up, chunks) if (chunks := getattr(model, "num_output_chunks", 0)) else None
        ):
            found = model(tokens)
        logits = (found if isinstance(found, Tensor) else torch.cat(found, 1))[:, : labels.size(1)]
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY).float(), labels.flatten(), reduction="sum")
        loss.backward()
        return Totals(loss.detach(), target_tokens)

    return forward_backward


def _filled_up(chunks: int, states: Tensor) -> Tensor:
    """Pad the states so that they divide into `chunks` chunks."""
    return F.pad(states, (0, 0, 0, -states.size(1) % chunks))


def runner_of(
    model: nn.Module,
    limit: int | Limit,
    forward_backward: Callable[[Sequence[Tensor]], Totals] | None = None,
    recovery: Recovery | None = None,
    stage: str = "",
    **options: Any,
) -> StepRunner[Tensor]:
    """Collective: return a runner for token sequences; an integer limit is a row limit."""
    limit = RowLimit(limit) if isinstance(limit, int) else limit
    kind = SampleKind(length_of=len, filler=lambda sample: sample[:1])  # the loss is that of the next token
    forward_backward = forward_backward or forward_backward_of(model)
    return StepRunner(model, forward_backward, limit=limit, kind=kind, recovery=recovery, stage=stage, **options)


def _joined_forward_backward(model: nn.Module, samples: Sequence[Tensor]) -> Totals:
    batch = join([{"tokens": sample, "labels": sample} for sample in samples], -100)
    labels = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    targets = targets_of(batch, labels, -100)
    with allowing_long_rows(model, batch), logits_only_for(model, lambda states: states.index_select(1, targets)):
        logits = model(**batch)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels[:, targets].flatten(), reduction="sum")
    loss.backward()
    return Totals(loss.detach(), int((labels != -100).sum()))


def gradients_of(model: nn.Module) -> Gradients:
    """Return a copy of this rank's shard of every gradient."""
    return {name: _copy(parameter.grad) for name, parameter in model.named_parameters()}


def _copy(gradient: Tensor | None) -> Tensor | None:
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    return None if gradient is None else gradient.clone()


def gradients_equal(left: Gradients, right: Gradients) -> bool:
    """Return True if all gradients are bitwise equal."""
    return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)
