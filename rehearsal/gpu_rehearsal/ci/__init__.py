"""Compare rehearsals with what a project expects of them."""
