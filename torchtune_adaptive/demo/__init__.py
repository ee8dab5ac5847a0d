"""Models, tokenizer, datasets and checkpointer that need no download."""
