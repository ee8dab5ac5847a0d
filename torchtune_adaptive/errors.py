"""Errors with a message for users, which states the fact, the limit and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from itertools import chain
from typing import Any


class Remedy(Enum):
    """Remedies, phrased for users of the library. `config/keys.py` phrases them for users of recipes."""

    SHORTER_SAMPLES = "use shorter samples"
    CHECKPOINT_ACTIVATIONS = "checkpoint activations"
    MORE_RANKS = "train on more ranks"
    LARGER_BUDGET = "raise the memory limit if one is set"
    SMALLER_LIMIT = "lower the limit"
    LESS_STATE = "use a smaller model, or an optimizer with less state"
    NO_RECOVERY = "pass Recovery(..., enabled=False)"
    RECOVERY = "remove enabled=False from Recovery(...)"
    FEWER_ROWS = "lower max_rows"
    MEASURING_STRATEGY = "pass strategy='linear'"
    ROOM_FOR_NCCL = "if CUDA was out of memory, leave more memory to NCCL: give CudaMemory a limit, for example 0.9"
    CAP_MEMORY = "set cap_bytes of MemoryMeter"


def without_backward(remedies: Sequence[Remedy]) -> tuple[Remedy, ...]:
    """Return the remedies that apply to a stage without a backward."""
    return tuple(each for each in remedies if each is not Remedy.CHECKPOINT_ACTIVATIONS)


class AdaptiveError(Exception):
    """Base class of all errors for users. Recipes print the message without a traceback."""

    def __init__(self, fact: str, *remedies: Remedy) -> None:
        super().__init__(fact, *remedies)
        self.fact = fact
        """The fact and the limit. A remedy that is not in `Remedy` is part of this text, too."""
        self.remedies = remedies

    def __str__(self) -> str:
        return self.in_words({})

    def in_words(self, words: Mapping[Remedy, str]) -> str:
        """Return the message. `words` has the texts of remedies that are phrased differently than in `Remedy`."""
        if not self.remedies:
            return self.fact
        *others, last = (words.get(remedy, remedy.value) for remedy in self.remedies)
        comma = "," if len(others) > 1 else ""
        return f"{self.fact}; {', '.join(others)}{comma} or {last}" if others else f"{self.fact}; {last}"


class ConfigError(AdaptiveError, ValueError):
    """A value is invalid. The message names the key or argument, the value and the allowed values."""


BETWEEN_ERRORS = "\n       "
"""Separator between the messages of several independent errors."""


def run_checks(checks: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run all checks and return their results. If any raise ConfigError, raise one with the messages of all."""
    results: list[Any] = []
    problems: list[str] = []
    for check in checks:
        try:
            results.append(check())
        except ConfigError as error:
            problems += str(error).split(BETWEEN_ERRORS)
    refuse(problems)
    return results


def refuse(*problems: Iterable[str]) -> None:
    """Raise one ConfigError that lists all problems, each once, if there are any."""
    if distinct := list(dict.fromkeys(chain(*problems))):
        raise ConfigError(BETWEEN_ERRORS.join(distinct))


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise ConfigError if the value is not one of the choices."""
    if value not in choices:
        raise ConfigError(f"{name}: {value!r} is unknown; allowed: {', '.join(map(str, choices))}")


class LimitExhaustedError(AdaptiveError):
    """A microbatch ran out of memory, and the limit cannot become smaller."""


class SampleTooLargeError(AdaptiveError):
    """A single sample exceeds the limit of a microbatch."""


class SampleError(AdaptiveError):
    """A sample cannot be read. The message names its index."""


class RecoveryUnsupportedError(AdaptiveError):
    """A step that runs out of memory cannot be repeated.

    Recovery is off, or it does not support how the model communicates or updates its weights.
    """


class UnrecoverableError(AdaptiveError):
    """The ranks cannot continue, for example because one has no memory even for its collectives."""


class CollectiveFailedError(UnrecoverableError):
    """A collective failed, for example because a peer has exited. If the run is restarted, it can resume."""


class OneRowDoesNotFitError(AdaptiveError):
    """A single row exceeds the memory budget."""


class RunFinished(Exception):
    """The run is already complete."""


class RunStopped(Exception):
    """The ranks have agreed to stop early, because one of them received a signal. The message contains the position."""


class CheckpointError(AdaptiveError):
    """A checkpoint could not be written or read."""
