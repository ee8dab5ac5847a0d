"""Scripts that know nothing of a rehearsal, rehearsed: each in a process of its own, on a null device."""
