"""Long runs in bad weather, and sweeps of minutes; a little of each, and of `make crash`, is a test."""
