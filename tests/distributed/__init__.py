"""Ranks beside each other, in steps without a recipe. What all rooms need: small models, and ways to share them out."""
