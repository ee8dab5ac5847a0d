"""`make crash`: runs that are killed over and over, and have to end as if nothing had happened."""
