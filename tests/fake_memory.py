"""A fake memory device for policies: tests set its figures."""

from collections.abc import Iterator
from contextlib import contextmanager


class FakeMemory:
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
