"""`make faults`: ranks that run out of memory at every operation of a step, of one stage or more. A few are a test."""
