"""What a config says: its keys as checked values, its sections as objects, and errors that name the key."""
