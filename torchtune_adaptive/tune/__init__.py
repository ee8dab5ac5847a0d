"""The parts of a recipe: devices and ranks, model, data, batch sizes, optimizer, steps and logging."""
