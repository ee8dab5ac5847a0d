"""Predictions of `adaptive_plan` compared with the needs of training runs."""
