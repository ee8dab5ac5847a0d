"""Ways to share the layers of a tiny Llama among ranks, and how a microbatch runs then, with data and without."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torchtune import training
from torchtune.models.llama3 import base_llama_tp_plan

from torchtune_adaptive.comm.tensor import Rehearsal
from torchtune_adaptive.step.runner import Totals

WHOLE, BY_TOKEN = Replicate(), Shard(1)
IGNORED = -100

PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": base_llama_tp_plan,
    "loss": lambda: {
        **base_llama_tp_plan(),
        "output": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    },
    "sequence": lambda: {
        **base_llama_tp_plan(),
        "tok_embeddings": RowwiseParallel(input_layouts=WHOLE, output_layouts=BY_TOKEN),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=BY_TOKEN, output_layouts=WHOLE),
        "layers.*.sa_norm": SequenceParallel(),
        "layers.*.mlp_norm": SequenceParallel(),
        "layers.*.attn": PrepareModuleInput(input_layouts=(BY_TOKEN, BY_TOKEN), desired_input_layouts=(WHOLE, WHOLE)),
        "layers.*.mlp": PrepareModuleInput(input_layouts=(BY_TOKEN,), desired_input_layouts=(WHOLE,)),
        "layers.*.attn.output_proj": RowwiseParallel(output_layouts=BY_TOKEN),
        "layers.*.mlp.w2": RowwiseParallel(output_layouts=BY_TOKEN),
    },
}
"""By name. "loss": logits stay in parts until the loss. "sequence": between layers each rank has some of the tokens."""


def parallelized(model: nn.Module, plan: str, mesh: DeviceMesh, *, without_data: bool) -> nn.Module:
    """Collective, unless without data."""
    model = training.prepare_mha_for_tp(model, mesh)
    return parallelize_module(model, mesh, PLANS[plan](), src_data_rank=None if without_data else 0)


class Batch(NamedTuple):
    tokens: Tensor
    labels: Tensor


def batch_of(plan: str, samples: Sequence[Tensor]) -> Batch:
    tokens = nn.utils.rnn.pad_sequence(list(samples), batch_first=True)
    labels = nn.utils.rnn.pad_sequence([sample[1:] for sample in samples], batch_first=True, padding_value=IGNORED)
    odd = tokens.size(1) % 2 if plan == "sequence" else 0  # tokens are dealt evenly there
    return Batch(F.pad(tokens, (0, odd)), F.pad(labels, (0, odd + 1), value=IGNORED))


def run(plan: str, model: nn.Module, batch: Batch) -> Tensor:
    """Forward and backward; the loss summed over target tokens."""
    logits = model(batch.tokens)
    if plan == "loss":
        with loss_parallel():  # which can take no sum
            loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
            loss.backward()
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach()
    chunks = [logits] if isinstance(logits, Tensor) else logits
    losses = [
        F.cross_entropy(chunk.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        for chunk, labels in zip(chunks, batch.labels.chunk(len(chunks), 1), strict=True)
    ]
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.detach()


def forward_backward_of(model: nn.Module, plan: str) -> Callable[[Sequence[Tensor]], Totals]:
    def forward_backward(samples: Sequence[Tensor]) -> Totals:
        batch = batch_of(plan, samples)
        return Totals(run(plan, model, batch), int((batch.labels != IGNORED).sum()))

    return forward_backward


def rehearsal_of(build: Callable[[], nn.Module], plan: str) -> Rehearsal[Tensor]:
    return Rehearsal(
        build=build,
        batch=partial(batch_of, plan),
        run=partial(run, plan),
        key_of=lambda samples: (len(samples), max(map(len, samples))),
    )
