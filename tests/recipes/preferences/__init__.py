"""Preference training: parity with stock, both stages, the reference computed first."""
