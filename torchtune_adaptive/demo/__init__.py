"""A model, a tokenizer, a dataset and a checkpointer that need no download."""
