"""One step: plan it, attempt it, agree on the outcome; when a rank runs out of memory, shrink the limit and repeat."""
