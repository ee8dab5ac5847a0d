"""What a recipe will need, from the recipe itself on a card that is not there: `adaptive_plan`."""
