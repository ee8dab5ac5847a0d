"""Small models, a tokenizer, datasets and a checkpointer for the demo configs. None of them needs a download."""
