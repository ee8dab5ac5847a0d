"""Runs that stop and go on: checkpoints, saves that fail, records of earlier versions."""
