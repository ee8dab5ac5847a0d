"""What a step will allocate, worked out without a device."""
