"""`adaptive_plan`: predict the memory of a recipe by rehearsing it on a null device."""
