"""Finetuning runs: parity with stock, search, recovery, token budgets, all meshes."""
