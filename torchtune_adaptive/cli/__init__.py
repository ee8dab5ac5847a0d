"""`tune-adaptive`: commands about runs, a module each. They import torch only where they need it, to answer at once."""
