"""`make faults`: ranks run out of memory at every operation of a step. Tests run a few of these cases."""
