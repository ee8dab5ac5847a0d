"""Recovery and batch-size search for transformers' Trainer and its subclasses (TRL). Needs `pip install '.[hf]'`."""

from torchtune_adaptive.hf.arguments import AdaptiveArguments
from torchtune_adaptive.hf.trainer import AdaptiveMixin, AdaptiveTrainer, adaptive

__all__ = ["AdaptiveArguments", "AdaptiveMixin", "AdaptiveTrainer", "adaptive"]
