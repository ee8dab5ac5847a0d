"""For how long the machine has kept a process from running, so that a test of time asks no more than that allows."""

from __future__ import annotations

import threading
import time

NAP_S = 0.02


class Lateness:
    """While open, a thread sleeps again and again, and adds up by how much later it wakes than it asked for."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._nap, daemon=True)

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _nap(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            self._over.wait(NAP_S)
            self.seconds += max(0.0, time.monotonic() - began - NAP_S)
