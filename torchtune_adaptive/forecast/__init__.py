"""`adaptive_plan`: predict the memory and speed of a recipe by running it on a null device (a simulated GPU)."""
