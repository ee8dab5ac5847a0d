"""GRPO of adapters with FSDP2 on one or many devices, with microbatches that adapt to their memory.

    tune run --nproc_per_node 8 adaptive_grpo_lora_finetune_distributed --config adaptive/llama3_2/3B_grpo_lora

The reference is the policy without its adapters. Everything else is as in adaptive_grpo_full_finetune_distributed.
"""

from adaptive_grpo_full_finetune_distributed import AdaptiveGRPOFullFinetuneDistributed

from torchtune_adaptive.checkpoints.contents import Contents
from torchtune_adaptive.config.remedies import KEYS_IN_PPO
from torchtune_adaptive.lifecycle.entry_point import DictConfig, run_recipe
from torchtune_adaptive.rl.settings import GRPO_KEYS, read_grpo_lora_settings


class AdaptiveGRPOLoraFinetuneDistributed(AdaptiveGRPOFullFinetuneDistributed):
    """One run that trains adapters."""

    def __init__(self, cfg: DictConfig) -> None:
        settings, grpo = read_grpo_lora_settings(cfg)
        self.begin(settings, grpo, Contents("lora_grpo", grpo.lora, settings.save_adapter_weights_only))


if __name__ == "__main__":
    run_recipe(AdaptiveGRPOLoraFinetuneDistributed, keys=GRPO_KEYS, remedies=KEYS_IN_PPO)
