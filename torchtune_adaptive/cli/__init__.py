"""The command line `tune-adaptive`. Modules import torch only where a command needs it."""
