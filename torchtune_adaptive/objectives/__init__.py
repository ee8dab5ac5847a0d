"""What a step trains on: finetuning and preference training, their stages, and validation."""
