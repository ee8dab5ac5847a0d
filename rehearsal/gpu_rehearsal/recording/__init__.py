"""What a rehearsed process records: the memory of each step, the work of one step, and calls of collectives."""
