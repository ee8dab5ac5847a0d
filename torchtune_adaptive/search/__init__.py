"""The largest limit that fits, found before training. Only `find` and `probe` need torch."""
