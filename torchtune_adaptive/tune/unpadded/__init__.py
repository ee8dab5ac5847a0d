"""Microbatches without padding: samples one after another in one row, each of which attention sees alone."""
