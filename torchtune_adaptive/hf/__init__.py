"""transformers' Trainer, and the trainers that derive from it (TRL's), on the engine. Needs `pip install '.[hf]'`."""

from torchtune_adaptive.hf.arguments import AdaptiveArguments
from torchtune_adaptive.hf.trainer import AdaptiveMixin, AdaptiveTrainer

__all__ = ["AdaptiveArguments", "AdaptiveMixin", "AdaptiveTrainer"]
