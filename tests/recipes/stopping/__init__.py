"""Runs that stop and go on: checkpoints, saves that fail, spoiled records."""
