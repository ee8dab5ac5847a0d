"""`adaptive_plan`: a recipe set up on tensors without data, to predict what it needs."""
