"""Errors that a user can act on: each states the fact, the limit, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any


class Remedy(Enum):
    """What a user of the library can do about an error. `config/remedies.py` has the same in keys of a config."""

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
    MEASURE = "measure on the device with find_max_batch_size"


def without_backward(remedies: Sequence[Remedy]) -> tuple[Remedy, ...]:
    """What helps where nothing is kept for a backward."""
    return tuple(each for each in remedies if each is not Remedy.CHECKPOINT_ACTIVATIONS)


class AdaptiveError(Exception):
    """Base of every error that this package raises for a user: shown as one message, without a traceback."""

    def __init__(self, fact: str, *remedies: Remedy) -> None:
        super().__init__(fact, *remedies)
        self.fact = fact
        """What is wrong; the remedy too, where there is only one way to say it."""
        self.remedies = remedies

    def __str__(self) -> str:
        return self.in_words({remedy: remedy.value for remedy in self.remedies})

    def in_words(self, words: Mapping[Remedy, str]) -> str:
        """The message, with each remedy in the words that are given for it."""
        if not self.remedies:
            return self.fact
        *others, last = (words[remedy] for remedy in self.remedies)
        comma = "," if len(others) > 1 else ""
        return f"{self.fact}; {', '.join(others)}{comma} or {last}" if others else f"{self.fact}; {last}"


class ConfigError(AdaptiveError, ValueError):
    """A value cannot work; the message names its key or argument, the value and what is allowed."""


class SeveralErrors(ConfigError):
    """Values that cannot work, each by itself."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__("\n       ".join(map(str, errors)))
        self.errors = errors


def together(checks: Iterable[Callable[[], Any]]) -> list[Any]:
    """What all of the checks return; everything that they refuse is one error."""
    results: list[Any] = []
    errors: list[ConfigError] = []
    for check in checks:
        try:
            results.append(check())
        except ConfigError as error:
            errors.append(error)
    raise_together(errors)
    return results


def raise_together(errors: Iterable[ConfigError]) -> None:
    """Raises the errors as one, each message once; nothing if there are none."""
    single = [one for error in errors for one in (error.errors if isinstance(error, SeveralErrors) else [error])]
    distinct = list({str(error): error for error in single}.values())
    if distinct:
        raise distinct[0] if len(distinct) == 1 else SeveralErrors(distinct)


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


class SampleTooLongError(ConfigError):
    """A sample that is longer than the model takes."""


class NotLearningError(AdaptiveError):
    """A run that goes on while nothing comes of it."""


class EarlyExitError(AdaptiveError):
    """Something in the run asked the process to end, with the status of success, before the run was done."""


class RecoveryUnsupportedError(AdaptiveError):
    """A step that runs out of memory cannot be run again: the model communicates, or updates its weights, in a way that
    forbids it, or recovery is off."""


class UnrecoverableError(AdaptiveError):
    """The ranks can no longer go on together, until something is changed: the message says what."""


class RanksPartedError(UnrecoverableError):
    """A collective failed: another rank has ended, or what connects them. Started again, the run goes on."""


class OneRowDoesNotFitError(AdaptiveError):
    """Not even one row is within the budget."""

    def __init__(self, fact: str, *remedies: Remedy, need_bytes: int | None, budget_bytes: int) -> None:
        super().__init__(fact, *remedies)
        self.need_bytes = need_bytes
        """What the probe measured; None where it ran out of memory, so that the need is unknown."""
        self.budget_bytes = budget_bytes

    def with_remarks(self, *remarks: str) -> OneRowDoesNotFitError:
        """This shortage, with what else there is to say of the row."""
        said = "; ".join(filter(None, remarks))
        fact = f"{self.fact} ({said})" if said else self.fact
        return OneRowDoesNotFitError(fact, *self.remedies, need_bytes=self.need_bytes, budget_bytes=self.budget_bytes)


class RunFinished(Exception):
    """There is nothing left to train; the message says so."""


class RunStopped(Exception):
    """The ranks have agreed to end before the work is done, as one of them was asked to; the message says where."""


class CheckpointError(AdaptiveError):
    """A checkpoint could not be written or read."""
