"""The samples of a run: loading, their kinds, layout without padding, and balancing over ranks."""
