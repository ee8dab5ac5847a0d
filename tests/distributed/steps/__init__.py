"""Steps in which nothing fails: what ranks communicate, which samples each runs, the examples that show them."""
