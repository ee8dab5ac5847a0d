"""A config checked as a run would check it, on a machine that need not be able to train it."""
