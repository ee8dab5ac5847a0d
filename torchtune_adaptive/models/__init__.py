"""Models and optimizers, built from the config."""
