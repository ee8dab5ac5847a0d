"""The journal of a run, and tables and pictures of runs and searches."""
