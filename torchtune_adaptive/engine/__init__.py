"""Recovery from out-of-memory errors, and the search for the largest microbatch, in plain PyTorch and FSDP2."""
