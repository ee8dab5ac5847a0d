"""The start and the end of a run's process: entry point, errors, signals, silent ranks, record and lock."""
