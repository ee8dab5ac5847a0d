"""Recovery and microbatches sized by measurement, for SkyRL's policy, critic and reference workers under FSDP2."""

from importlib.util import find_spec

if find_spec("skyrl") is None:
    raise ImportError("torchtune_adaptive.skyrl needs SkyRL: pip install 'skyrl[fsdp]'")

from torchtune_adaptive.skyrl.workers import AdaptiveWorker, SkyRLArguments, adaptive

__all__ = ["AdaptiveWorker", "SkyRLArguments", "adaptive"]
