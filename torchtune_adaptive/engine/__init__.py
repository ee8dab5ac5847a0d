"""A step that survives out of memory, and the largest one that fits: plain PyTorch and FSDP2, nothing of torchtune."""
