"""Batch sizes over a run: how they grow from epoch to epoch, and how rows trade against accumulation. No torch."""

from torchtune_adaptive.schedules.growth import add_every, double_every, milestones

__all__ = ["add_every", "double_every", "milestones"]
