"""What `adaptive_plan` says, beside what a training run needs."""
