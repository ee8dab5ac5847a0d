"""transformers' Trainer on two ranks with too little memory for their batches. No GPU, no download:

pip install '.[hf]'
torchrun --nproc_per_node 2 examples/transformers_trainer.py --memory_limit 5MiB            # DDP
torchrun --nproc_per_node 2 examples/transformers_trainer.py --memory_limit 5MiB --fsdp2    # FSDP2
"""

from dataclasses import dataclass
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig

from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveTrainer


@dataclass
class ExampleArguments:
    fsdp2: bool = False


adaptive, example = HfArgumentParser((AdaptiveArguments, ExampleArguments)).parse_args_into_dataclasses()
set_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
samples = [torch.arange(start, start + 48) for start in torch.randint(1, 200, (96,)).tolist()]
dataset = [{"input_ids": sample, "labels": sample} for sample in samples]
with TemporaryDirectory() as folder:
    if example.fsdp2:  # from_pretrained shards the model; Trainer's option fsdp does this on GPUs only
        model.save_pretrained(folder)
        dist.init_process_group("gloo")
        sharded = DistributedConfig(fsdp_size=dist.get_world_size())
        model = LlamaForCausalLM.from_pretrained(folder, distributed_config=sharded, dtype=torch.float32)
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=16,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    AdaptiveTrainer(model, arguments, train_dataset=dataset, adaptive=adaptive).train()
