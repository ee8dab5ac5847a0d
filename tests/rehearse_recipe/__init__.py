"""Predictions of `tune-adaptive plan` compared with the needs of training runs."""
