"""Errors that a user can act on. Each message states the fact, the limit and the remedy."""


class AdaptiveError(Exception):
    """Base of every error that this package raises for a user: shown as one message, without a traceback."""


class ConfigError(AdaptiveError, ValueError):
    """A value of the config cannot work; the message names its key, the value and what is allowed."""
