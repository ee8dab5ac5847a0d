"""Faults for tests, of ours and of a training loop of yours: a chosen operation fails, or a rank has less memory."""

from torchtune_adaptive.testing.faults import FaultInjector
from torchtune_adaptive.testing.scarcity import memory_cap

__all__ = ["FaultInjector", "memory_cap"]
