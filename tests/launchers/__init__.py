"""Tests of the files in examples/launchers, with the schedulers' own packages. `make test-launchers` runs them."""
