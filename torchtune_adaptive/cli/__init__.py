"""The command line `tune-adaptive`. Its modules import torch only for commands that need it."""
