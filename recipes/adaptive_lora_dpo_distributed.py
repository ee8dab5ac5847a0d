"""Preference training of adapters (DPO) with FSDP2 on one or many devices, with microbatches that adapt to memory.

    tune run --nproc_per_node 2 adaptive_lora_dpo_distributed --config llama3_1/8B_lora_dpo

Accepts every config of torchtune's lora_dpo_distributed unchanged. The reference is the policy without its adapters.
Everything else is as in adaptive_full_dpo_distributed.
"""

from adaptive_full_dpo_distributed import AdaptiveFullDPODistributed

from torchtune_adaptive.checkpoints.contents import Contents
from torchtune_adaptive.config.checks import read_lora_settings
from torchtune_adaptive.lifecycle.entry_point import DictConfig, run_recipe
from torchtune_adaptive.loop.training_loop import Run


class AdaptiveLoraDPODistributed(AdaptiveFullDPODistributed):
    """One run that trains adapters."""

    def __init__(self, cfg: DictConfig) -> None:
        settings, lora = read_lora_settings(cfg)
        self.run = Run(settings, Contents("lora_dpo", lora, settings.save_adapter_weights_only))


if __name__ == "__main__":
    run_recipe(AdaptiveLoraDPODistributed)
