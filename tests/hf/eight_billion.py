"""transformers' Trainer on Llama 3.1 8B, made from its configuration, with four batches a step: stock, or adaptive.

rehearse --ranks 8 --memory 80GB --steps 3 -- tests/hf/eight_billion.py [adaptive]
"""

import sys
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from torchtune_adaptive.hf import AdaptiveTrainer

config = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    use_cache=False,
    dtype=torch.bfloat16,
)
model = LlamaForCausalLM._from_config(config)
with TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        gradient_checkpointing=True,
        max_steps=3,
        report_to=[],
        save_strategy="no",
        fsdp=True,
        fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    kind = AdaptiveTrainer if sys.argv[1:] == ["adaptive"] else Trainer
    kind(model, arguments, train_dataset=[{"input_ids": [1] * 4096, "labels": [1] * 4096}] * 128).train()
