"""What a recipe is made of: place, model, data, a size that fits, a schedule, steps and what they log."""
