"""The start and the end of a run's process: entry point, errors, signals, record and lock."""
