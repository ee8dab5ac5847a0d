"""GRPO: any number of ranks, any split and any recovery train the same; a run that stops goes on."""
