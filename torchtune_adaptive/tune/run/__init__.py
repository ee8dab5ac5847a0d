"""What a recipe does with its parts: finding what fits, planning epochs, logging, saving progress."""
