"""Errors with a message for users, which states the fact, the limit and the remedy."""


class ConfigError(ValueError):
    """An argument, or a value in a file of cases, is invalid."""


class NullCudaError(RuntimeError):
    """A null device cannot be built on this machine, or does not exist in this process."""


class CannotRehearse(NullCudaError):
    """The command cannot be rehearsed; the message is one line."""
