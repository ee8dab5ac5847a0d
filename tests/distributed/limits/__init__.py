"""Limits on ranks that differ: found before training, by length, and changed during training."""
