"""The training loop, its schedule and metrics, and the search for the batch size."""
