"""`tune-adaptive plan`: rehearse a recipe with stand-ins for its weights, tokenizer and data."""
