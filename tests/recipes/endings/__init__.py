"""How runs end after user errors, signals, lost nodes and silent ranks."""
