"""What a recipe is assembled from: devices, model, loss, optimizer, data, checkpoints and the rest."""
