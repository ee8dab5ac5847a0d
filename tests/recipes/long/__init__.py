"""Long runs under memory pressure and minutes-long sweeps; tests run a part of each, and of `make crash`."""
