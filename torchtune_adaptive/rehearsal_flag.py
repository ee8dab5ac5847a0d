"""Whether this process is a rehearsal, where nothing is computed or sent (`rehearse/` starts one), and whether it is at
a trial, whose steps do not count."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Rehearsal:
    def __init__(self) -> None:
        self.on = False
        self.trying = False
        self.when_tried: list[Callable[[], object]] = []
        """Called when a trial has ended."""

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Around steps that measure, as those of a search."""
        self.trying = True
        try:
            yield
        finally:
            self.trying = False
            for each in self.when_tried:
                each()


REHEARSAL = Rehearsal()
