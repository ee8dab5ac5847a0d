"""Predictions: beside what recipes allocate, beside what was published, and started as they advise."""
