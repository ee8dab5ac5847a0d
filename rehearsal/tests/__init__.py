"""Rehearsals of ordinary scripts, each in a separate process on a null device."""
