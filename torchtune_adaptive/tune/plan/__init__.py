"""`adaptive_plan`: what is asked of a prediction, its answer, advice, and the command that trains with it."""
