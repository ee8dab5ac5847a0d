"""What fits in a microbatch, how a step is cut so that it does, and which limit comes next. No torch."""
