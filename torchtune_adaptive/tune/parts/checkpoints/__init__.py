"""Checkpoints that cannot be lost: complete or absent, found again by themselves."""

from torchtune_adaptive.tune.parts.checkpoints.contents import FullContents, LoraContents
from torchtune_adaptive.tune.parts.checkpoints.saving import Checkpoints
from torchtune_adaptive.tune.parts.checkpoints.start import Start, find_start

__all__ = ["Checkpoints", "FullContents", "LoraContents", "Start", "find_start"]
