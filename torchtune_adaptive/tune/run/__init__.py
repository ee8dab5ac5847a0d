"""What a recipe does with its parts: finding what fits, sizing epochs, logging, saving progress."""
