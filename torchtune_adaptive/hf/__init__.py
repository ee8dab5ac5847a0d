"""Recovery and batch-size search for transformers' Trainer and its subclasses (TRL). Needs `pip install '.[hf]'`."""

from importlib.util import find_spec

if missing := [name for name in ("accelerate", "transformers") if find_spec(name) is None]:
    raise ImportError(f"torchtune_adaptive.hf needs {' and '.join(missing)}: pip install 'torchtune-adaptive[hf]'")

from torchtune_adaptive.arguments import AdaptiveArguments
from torchtune_adaptive.hf.trainer import AdaptiveMixin, AdaptiveTrainer, adaptive

__all__ = ["AdaptiveArguments", "AdaptiveMixin", "AdaptiveTrainer", "adaptive"]
