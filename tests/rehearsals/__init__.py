"""Predictions for recipes, compared with runs and published figures."""
