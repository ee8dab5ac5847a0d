"""Errors that a user can act on. Each message states the fact, the limit and the remedy."""

from collections.abc import Collection


class AdaptiveError(Exception):
    """Base of every error that this package raises for a user: shown as one message, without a traceback."""


class ConfigError(AdaptiveError, ValueError):
    """A value of the config cannot work; the message names its key, the value and what is allowed."""


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Refuses a value that is none of the choices."""
    if value not in choices:
        raise ConfigError(f"{name}: {value!r} is unknown; allowed: {', '.join(map(str, choices))}")


class LimitExhaustedError(AdaptiveError):
    """A microbatch that cannot be made smaller does not fit."""


class SampleTooLargeError(AdaptiveError):
    """A sample that alone is more than a microbatch may be."""


class SampleError(AdaptiveError):
    """A sample that cannot be read, or that the model cannot take; the message names it by its index."""


class NotLearningError(AdaptiveError):
    """A run that goes on while nothing comes of it."""


class EarlyExitError(AdaptiveError):
    """The process was asked to end before the run was done, with the status of success."""


class RecoveryUnsupportedError(AdaptiveError):
    """The model communicates, or updates its weights, in a way that a step cannot be run again."""


class UnrecoverableError(AdaptiveError):
    """The ranks can no longer go on together: training has to start again from the last checkpoint."""


class OneRowDoesNotFitError(AdaptiveError):
    """Not even one row is within the budget."""

    def __init__(self, message: str, *, need_bytes: int | None, budget_bytes: int) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes
        """What the probe measured; None where it ran out of memory, so that the need is unknown."""
        self.budget_bytes = budget_bytes


class RunFinished(Exception):
    """There is nothing left to train; the message says so."""


class PredictionError(AdaptiveError):
    """What a step allocates cannot be predicted."""


class CheckpointError(AdaptiveError):
    """A checkpoint could not be written or read."""
