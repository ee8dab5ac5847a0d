"""Global flags of a rehearsal (started by `rehearse/`), without computation or communication.

During a trial, such as a search, steps are not reported.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Rehearsal:
    """The state of this process: rehearsal or not, inside a trial or not."""

    def __init__(self) -> None:
        self.on = False
        self.trying = False
        self.when_tried: list[Callable[[], object]] = []
        """Callbacks for the end of a trial."""

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Mark steps that only measure, such as those of a search."""
        self.trying = True
        try:
            yield
        finally:
            self.trying = False
            for each in self.when_tried:
                each()


REHEARSAL = Rehearsal()
