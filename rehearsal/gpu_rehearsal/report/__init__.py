"""Read the record of a rehearsal, and report it: the verdict, a text, JSON."""
