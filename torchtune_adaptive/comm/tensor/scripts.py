"""What microbatches communicate under tensor parallelism, by their shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeAlias, TypeVar

from torchtune_adaptive.comm.counting import Collective
from torchtune_adaptive.comm.tensor.functional import FunctionalCollective
from torchtune_adaptive.comm.tensor.refusals import SAYS_OTHERWISE, refused

Sample = TypeVar("Sample")
Entry: TypeAlias = Collective | FunctionalCollective
Script: TypeAlias = tuple[Entry, ...]

MOST_SCRIPTS = 128
"""Scripts that are kept: those of the microbatches that ran last. Each is a few hundred entries, and a shadow can write
it again."""


class Scripts(Generic[Sample]):
    """Scripts of the microbatches that ran last. One that is missing is written by a pass without data."""

    def __init__(
        self, key_of: Callable[[Sequence[Sample]], Hashable], rehearse: Callable[[Sequence[Sample]], Script]
    ) -> None:
        self.key_of = key_of
        self._rehearse = rehearse
        self._kept: OrderedDict[Hashable, Script] = OrderedDict()
        self._compared = False  # whether a whole pass without data was found to be like one with data

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        """From now on the same shapes communicate otherwise."""
        self._kept.clear()
        self._compared = False

    def agrees(self, microbatch: Sequence[Sample], seen: Script) -> bool:
        """Whether a microbatch has communicated what the script of its shape says; the first of a shape writes it."""
        key = self.key_of(microbatch)
        return self._keep(key, self._kept.get(key, seen)) == seen

    def script_for(self, microbatch: Sequence[Sample], done: Sequence[Sequence[Sample]]) -> Script:
        """The script of a microbatch that may not have run. `done`: those of its step that have run to their end."""
        key = self.key_of(microbatch)
        if key not in self._kept:
            if not self._compared:
                self._compare(done)
            self._keep(key, self._rehearse(microbatch))
        return self._kept[key]

    def _compare(self, done: Sequence[Sequence[Sample]]) -> None:
        """Compares a pass without data with one that had data, if one is known."""
        known = next((each for each in done if self.key_of(each) in self._kept), None)
        if known is None:
            return
        if self._rehearse(known) != self._kept[self.key_of(known)]:
            raise refused(SAYS_OTHERWISE)
        self._compared = True

    def _keep(self, key: Hashable, script: Script) -> Script:
        self._kept[key] = script
        self._kept.move_to_end(key)
        if len(self._kept) > MOST_SCRIPTS:
            self._kept.popitem(last=False)
        return script
