"""For how long the machine has kept a process from running, so that a test of time asks no more than that allows."""

from __future__ import annotations

import math
import threading
import time

NAP_S = 0.02


class Lateness:
    """While open, a thread sleeps again and again, and notes by how much later it wakes than it asked for."""

    def __init__(self) -> None:
        self._naps: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._nap, daemon=True)

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()  # a stall that has just ended is not noted yet

    def between(self, began: float, ended: float = math.inf) -> float:
        """Seconds that this process did not run, by naps that lie in this time in part or whole."""
        return sum(late for woke, late in self._naps if woke >= began and woke - late <= ended)

    def _nap(self) -> None:
        while not self._over.is_set():
            began = time.time()
            time.sleep(NAP_S)
            woke = time.time()
            self._naps.append((woke, max(0.0, woke - began - NAP_S)))
