"""Runs that stop and resume: checkpoints, failed saves, damaged records."""
