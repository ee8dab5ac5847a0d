"""What a user does to a run, and how it ends: mistakes, signals, lost nodes, silent ranks."""
