"""Small torchtune models, and samples of many lengths for them."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.data import padded_collate_sft
from torchtune.models.gemma import gemma
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.models.phi3 import phi3
from torchtune.models.qwen2 import qwen2
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.modules.peft import get_adapter_params, set_trainable_params

from tests.unit.data.minimal_config import NEEDED
from torchtune_adaptive.config.keys import AdaptiveConfig, Settings
from torchtune_adaptive.data.loading import CheckedDataset, Data
from torchtune_adaptive.data.unpadded import concatenated, support_documents
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.objectives.finetuning import ForwardBackward

CPU = torch.device("cpu")
VOCABULARY = 128
IGNORED = -100
LENGTHS = (1, 7, 33, 2, 19, 64, 5, 1, 40)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 48,
    "max_seq_len": 64,
}


def lora(**sizes: Any) -> nn.Module:
    modules = ["q_proj", "v_proj", "output_proj"]
    model = lora_llama3_2(modules, apply_lora_to_mlp=True, lora_rank=4, lora_alpha=8, **sizes)
    set_trainable_params(model, get_adapter_params(model))
    for name, parameter in model.named_parameters():
        if "lora_b" in name:  # zero at first, so that lora_a would have no gradient
            nn.init.normal_(parameter, std=0.02)
    return model


def narrow_gemma(**sizes: Any) -> nn.Module:
    return gemma(**{**sizes, "num_kv_heads": 1, "head_dim": 16})


MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama3_2": llama3_2,
    "lora": lora,
    "qwen2": qwen2,
    "gemma": narrow_gemma,
    "phi3": phi3,
}


def build(kind: str = "llama3_2", **sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[kind](**{**SIZES, **sizes})
    model.set_num_output_chunks(8)
    support_documents(model)
    return model.train()


def samples(lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return samples whose labels include every token, as with `train_on_input`."""
    draw = random.Random(seed)
    tokens = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    return [{"tokens": each, "labels": list(each)} for each in tokens]


def padded(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    return padded_collate_sft(batch, padding_idx=0, ignore_idx=IGNORED)


def unpadded(batch: list[dict[str, Any]]) -> dict[str, Any]:
    return concatenated(batch, IGNORED)


def totals_and_gradients(
    model: nn.Module,
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]],
    *microbatches: list[dict[str, Any]],
    device: torch.device = CPU,
    loss_fn: nn.Module | None = None,
) -> tuple[Totals, dict[str, Tensor]]:
    """Return totals and gradients, summed over these microbatches."""
    data: Any = Data(CheckedDataset([]), packed=False, collate=collate, loader=None, max_seq_len=None)
    settings = Settings(**NEEDED, adaptive=AdaptiveConfig(token_budget=1))
    step = ForwardBackward(model, loss_fn or CEWithChunkedOutputLoss(), data, settings, device)
    model.zero_grad()
    parts = [step(microbatch) for microbatch in microbatches]
    totals = Totals(sum(part.loss_sum for part in parts), sum(part.target_tokens for part in parts))
    return totals, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference of gradients, relative to the maximum of their tensor."""
    assert ours.keys() == theirs.keys()
    assert len(ours) > 4
    smallest = torch.finfo(torch.float32).tiny  # a shard of an embedding may be all zeros
    return max(
        ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max().clamp(smallest)).item() for name in ours
    )
