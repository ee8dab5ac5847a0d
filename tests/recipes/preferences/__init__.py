"""Preference training: beside stock, both stages, the reference asked before."""
