"""Recovery and a search for the batch size in torchtitan's own Trainer."""

from importlib.util import find_spec

if find_spec("torchtitan") is None:
    raise ImportError("torchtune_adaptive.titan needs torchtitan: pip install torchtitan==0.3.0")

from torchtune_adaptive.titan.trainer import AdaptiveTrainer, TitanArguments, adaptive

__all__ = ["AdaptiveTrainer", "TitanArguments", "adaptive"]
