"""How a recipe begins and ends: what started it and where its ranks meet, its command line, its lock and its file in
the output directory, signals, silence, and how errors are told."""
