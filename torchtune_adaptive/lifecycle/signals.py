"""Handles signals: after the first one, all ranks stop together after a step. A second one ends this rank at once.

A thread handles them, because Python runs signal handlers only in the main thread, which may be blocked in a
collective. Python's C code writes the number of each signal to a pipe immediately, and the thread reads the pipe.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType

from torchtune_adaptive.lifecycle import torchrun
from torchtune_adaptive.lifecycle.run_state import SIGNALLED, THIS_RUN, RunPhase

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
ONE_SIGNAL_S = 1.0
"""Signals within this time count as one, because Ctrl-C arrives from the terminal and once more from the launcher."""


def listen() -> None:
    """Start to handle signals, except those that are ignored already, for example by nohup."""
    if threading.current_thread() is not threading.main_thread():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _ignored_by_the_main_thread)
            signal.siginterrupt(number, False)  # do not interrupt system calls of the main thread
    torchrun.write_pid_file()
    os.register_at_fork(after_in_child=stop_listening)  # so that a signal to a data worker does not stop the run
    threading.Thread(target=_receive, args=(reader,), daemon=True).start()


def stop_listening() -> None:
    """Restore the default handlers, which end the process."""
    signal.set_wakeup_fd(-1)
    for number in HANDLED:
        if signal.getsignal(number) is _ignored_by_the_main_thread:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _ignored_by_the_main_thread(number: int, frame: FrameType | None) -> None: ...


def _receive(reader: int) -> None:
    first_at_s: float | None = None
    while numbers := os.read(reader, 64):
        for number in filter(HANDLED.__contains__, numbers):
            if first_at_s is None:
                _stop_at_next_step(signal.Signals(number))
                # only now, because recording the signal may take longer than ONE_SIGNAL_S while its copy waits
                first_at_s = time.monotonic()
            elif time.monotonic() - first_at_s > ONE_SIGNAL_S:
                _exit_now(signal.Signals(number))


def _stop_at_next_step(received: signal.Signals) -> None:
    """Request a stop, which the ranks learn in their next agreement, and report the signal on rank 0."""
    if received == signal.SIGTERM and torchrun.peer_has_exited():
        os._exit(128 + received)  # torchrun sends SIGTERM to all ranks if one has failed
    THIS_RUN.signal = received
    if int(os.environ.get("RANK", "0")) != 0:
        return
    time_left = ""
    if torchrun.attempt_directory() is not None:
        time_left = f" (if torchrun forwarded the signal, it waits {torchrun.launcher_timeout_s():g} s)"
    _print(
        f"{received.name}: {THIS_RUN.phase.value}; until then {THIS_RUN.saved}{time_left}. "
        "A second signal ends the run immediately"
    )
    THIS_RUN.try_to_record_end(SIGNALLED, f"{received.name}; the run was then killed without another message")


def _exit_now(received: signal.Signals) -> None:
    if torchrun.first_to_report():
        since = " since then" if THIS_RUN.newest_checkpoint else ""
        lost = "" if THIS_RUN.phase is RunPhase.SETTING_UP else f", and all training{since} is lost"
        message = f"{received.name}, the second signal: ended immediately; {THIS_RUN.saved}{lost}"
        _print(message)
        THIS_RUN.try_to_record_end(SIGNALLED, message)
    os._exit(128 + received)


def _print(line: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(f"\n{line}", file=sys.stderr, flush=True)
