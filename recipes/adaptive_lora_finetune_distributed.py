"""LoRA, DoRA and QLoRA finetuning with FSDP2 on one or many devices, with microbatches that adapt to their memory.

    tune run --nproc_per_node 2 adaptive_lora_finetune_distributed --config llama3_1/8B_lora

Accepts every config of torchtune's lora_finetune_distributed unchanged. Everything except the model is as in
adaptive_full_finetune_distributed.
"""

from adaptive_full_finetune_distributed import AdaptiveFullFinetuneDistributed

from torchtune_adaptive.checkpoints.contents import Contents
from torchtune_adaptive.config.checks import read_lora_settings
from torchtune_adaptive.lifecycle.entry_point import DictConfig, run_recipe
from torchtune_adaptive.loop.training_loop import Run


class AdaptiveLoraFinetuneDistributed(AdaptiveFullFinetuneDistributed):
    """One run that trains adapters."""

    def __init__(self, cfg: DictConfig) -> None:
        settings, lora = read_lora_settings(cfg)
        self.run = Run(settings, Contents("lora", lora, settings.save_adapter_weights_only))


if __name__ == "__main__":
    run_recipe(AdaptiveLoraFinetuneDistributed)
