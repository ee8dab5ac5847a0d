"""The optimizer, what it does at the end of a step, and its state on the way to a checkpoint and back."""
