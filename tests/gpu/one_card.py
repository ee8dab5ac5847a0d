"""Steps on one card, real or rehearsed, which print memory and seconds: python -m tests.gpu.one_card plain"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.gpu.old_cudnn import use_torchs_attention_with_old_cudnn

VOCABULARY, ROWS = 128_256, 4
LENGTHS = (512, 2048, 1024, 1536, 2048, 2048)
"""Tokens of the samples in each step."""
ONE_BILLION = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
RECIPE = {
    "vocab_size": 32_768,
    "embed_dim": 2048,
    "intermediate_dim": 8192,
    "num_layers": 8,
    "num_heads": 32,
    "num_kv_heads": 8,
}


def llama() -> Any:
    """Return the architecture of Llama 3.2 1B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **ONE_BILLION, **heads, use_cache=False))


_began = perf_counter()


def report() -> None:
    """Print allocated and reserved peak and the seconds since the last report."""
    global _began
    torch.cuda.synchronize()
    peaks = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    print("peak", json.dumps(peaks), f"\nseconds {perf_counter() - _began:.4f}", flush=True)
    torch.cuda.reset_peak_memory_stats()
    _began = perf_counter()


def steps(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for length in LENGTHS:
        tokens = torch.randint(0, VOCABULARY, (ROWS, length), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report()


def plain() -> None:
    with torch.device("cuda"):
        model = llama()
    steps(model.to(torch.bfloat16).train())


def fsdp2() -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29577")
    dist.init_process_group("nccl")
    with torch.device("meta"):
        model = llama()
    in_bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for part in [*model.model.layers, model]:
        fully_shard(part, mp_policy=in_bf16)
    model.to_empty(device="cuda").train()
    steps(model)
    dist.destroy_process_group()


def train(model: nn.Module, **options: Any) -> None:
    """Train with transformers' Trainer: two batches per step, and bf16."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Reporting(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            report()

    samples = [torch.randint(0, VOCABULARY, (length,)) for length in LENGTHS for _ in range(2 * ROWS)]
    common: dict[str, Any] = {"save_strategy": "no", "report_to": [], "train_sampling_strategy": "sequential"}
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=2,
            max_steps=len(LENGTHS),
            bf16=True,
            disable_tqdm=True,
            **common,
            **options,
        )
        dataset = [{"input_ids": sample, "labels": sample} for sample in samples]
        Trainer(model, arguments, train_dataset=dataset, callbacks=[Reporting()]).train()


def trainer() -> None:
    with torch.device("cuda"):
        model = llama()
    train(model, gradient_checkpointing=True)


def qlora() -> None:
    """Train LoRA on weights in NF4, with optimizer states in 8 bits."""
    from bitsandbytes.nn import Linear4bit
    from peft import LoraConfig, get_peft_model

    model = llama().to(torch.bfloat16)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, linear in list(block.named_children()):
                if isinstance(linear, nn.Linear):
                    options = {"bias": False, "compute_dtype": torch.bfloat16, "quant_type": "nf4"}
                    quantized = Linear4bit(linear.in_features, linear.out_features, **options)
                    quantized.load_state_dict(linear.state_dict())
                    setattr(block, name, quantized)
    adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    train(adapted.to("cuda"), optim="adamw_bnb_8bit")


class Reporter:
    """A metric logger that reports every step."""

    def __init__(self, path: str) -> None:
        pass

    def log_config(self, config: object) -> None:
        pass

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        report()
        print("rows", int(payload["microbatch_rows"]), flush=True)

    def close(self) -> None:
        pass


def recipe() -> None:
    """Run this package's full finetuning recipe: a search, then its steps."""
    from tests.ranks import free_ports
    from tests.recipes.running import demo_config, run_ours

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="localhost")
    os.environ["MASTER_PORT"] = str(free_ports(1)[0])
    sizes = [f"{section}.{name}={size}" for name, size in RECIPE.items() for section in ("model", "checkpointer.sizes")]
    changes = ["device=cuda", "dtype=bf16", "tokenizer.max_seq_len=2048", "dataset.samples=512", "batch_size=64"]
    changes += ["use_maximum_batch_size=True", "metric_logger._component_=tests.gpu.one_card.Reporter"]
    changes += ["max_steps_per_epoch=4", "gradient_accumulation_steps=1", "save_adapter_weights_only=False"]
    with TemporaryDirectory() as folder:
        run_ours("full", demo_config("full", Path(folder) / "run", *sizes, *changes))


CASES = {case.__name__: case for case in (plain, fsdp2, trainer, qlora, recipe)}

if __name__ == "__main__":
    torch.manual_seed(0)
    use_torchs_attention_with_old_cudnn()
    CASES[sys.argv[1]]()
