"""How much memory there is, how much a step needed, and how everything is put back. Never torch.distributed."""
