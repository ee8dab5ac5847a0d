"""Small models, a tokenizer, datasets and a checkpointer for the demo configs, without downloads."""
