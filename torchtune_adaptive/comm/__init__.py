"""What ranks say to each other, and the insides of FSDP2: below `tune/`, only this room uses torch.distributed."""
