"""What fits, on ranks that differ: found before training, by length, changed at the edge of memory."""
