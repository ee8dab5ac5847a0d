"""Measurements of this package next to others. Each prints a table and writes JSON to benchmarks/results/."""
