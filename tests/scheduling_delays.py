"""Measure how long the machine kept this process from running, so that timing tests can allow for it."""

from __future__ import annotations

import math
import threading
import time

NAP_S = 0.02


class SchedulingDelays:
    """While open, a thread sleeps repeatedly and records how late it wakes up."""

    def __init__(self) -> None:
        self._naps: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._nap, daemon=True)

    def __enter__(self) -> SchedulingDelays:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()  # a stall that has just ended is not recorded yet

    def between(self, began: float, ended: float = math.inf) -> float:
        """Return the seconds during which this process did not run, from all naps that overlap this interval."""
        return sum(late for woke, late in self._naps if woke >= began and woke - late <= ended)

    def _nap(self) -> None:
        while not self._over.is_set():
            began = time.time()
            time.sleep(NAP_S)
            woke = time.time()
            self._naps.append((woke, max(0.0, woke - began - NAP_S)))
