"""Pictures of searches and runs; they need matplotlib, the extra `plot`."""
