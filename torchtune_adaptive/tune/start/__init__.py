"""From the command line to checked values: launching, configs, keys, settings."""
