"""Steps of Llama 3.2 1B on one card, real or rehearsed, which print their memory: python -m tests.gpu.one_card plain"""

import json
import os
import sys
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, ROWS = 128_256, 4
LENGTHS = (512, 2048, 1024, 1536, 2048)
"""Tokens of the samples in each step."""


def llama() -> LlamaForCausalLM:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8, use_cache=False))


def report() -> None:
    print("peak", json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]), flush=True)
    torch.cuda.reset_peak_memory_stats()


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


class Reporting(TrainerCallback):
    def on_step_end(self, *_: object, **__: object) -> None:
        report()


def trainer() -> None:
    """Train with two batches per step, checkpointing and bf16."""
    samples = [torch.randint(0, VOCABULARY, (length,)) for length in LENGTHS for _ in range(2 * ROWS)]
    options: dict[str, Any] = {"save_strategy": "no", "report_to": [], "train_sampling_strategy": "sequential"}
    with torch.device("cuda"):
        model = llama()
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=2,
            activation_checkpointing=True,
            max_steps=len(LENGTHS),
            bf16=True,
            disable_tqdm=True,
            **options,
        )
        dataset = [{"input_ids": sample, "labels": sample} for sample in samples]
        Trainer(model, arguments, train_dataset=dataset, callbacks=[Reporting()]).train()


CASES = {case.__name__: case for case in (plain, fsdp2, trainer)}

if __name__ == "__main__":
    torch.manual_seed(0)
    CASES[sys.argv[1]]()
