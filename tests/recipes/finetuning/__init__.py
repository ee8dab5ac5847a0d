"""Finetuning runs: beside stock, searching, recovering, by tokens, on every mesh."""
