"""`make crash`: runs that are killed repeatedly and have to end like an undisturbed run."""
