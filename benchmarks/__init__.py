"""Side-by-side measurements. Each prints a table and writes JSON under benchmarks/results/."""
