"""transformers' Trainer on two ranks with too little memory for their batches. No GPU, no download:

pip install '.[hf]'
torchrun --nproc_per_node 2 examples/transformers_trainer.py --memory_limit 5MiB
"""

from tempfile import TemporaryDirectory

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveTrainer

(adaptive,) = HfArgumentParser(AdaptiveArguments).parse_args_into_dataclasses()
set_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
samples = [torch.arange(start, start + 48) for start in torch.randint(1, 200, (96,)).tolist()]
dataset = [{"input_ids": sample, "labels": sample} for sample in samples]
with TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=16,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
    )
    AdaptiveTrainer(model, arguments, train_dataset=dataset, adaptive=adaptive).train()
