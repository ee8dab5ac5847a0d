"""How a recipe begins and ends: its command line, its run's file, signals, silence, and how errors are told."""
