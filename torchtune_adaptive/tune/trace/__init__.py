"""A recipe's own step on tensors without data: what it allocates and computes, as laws of rows and tokens."""
