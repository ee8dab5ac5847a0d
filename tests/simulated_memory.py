"""Simulated devices for policies and searches."""

from collections.abc import Iterator
from contextlib import contextmanager

from torchtune_adaptive.errors import OneRowDoesNotFitError


def always_fits() -> OneRowDoesNotFitError:
    """For memory functions under which one row always fits."""
    raise AssertionError("one row did not fit")


class FakeMemory:
    """A memory device for policies: tests set its figures."""

    def __init__(self, *, budget_bytes: int = 1000, peak_bytes: int = 700) -> None:
        self.budget_bytes = budget_bytes
        self.peak_bytes = peak_bytes
        self.retries = 0
        self.fullness = 0.0

    def reset_peak(self) -> None:
        self.peak_bytes = 0

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        yield
