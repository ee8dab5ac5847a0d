"""Steps without failures: collectives, dealt samples, and the examples."""
