"""Replay the calls of all ranks, and explain which ranks wait for each other."""
