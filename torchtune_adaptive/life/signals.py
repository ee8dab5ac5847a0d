"""Signals: after the first, the ranks agree to stop at their next step; a second one ends this rank immediately.

A thread receives them. Python runs signal handlers in the main thread only, which may be blocked in a collective, but
its C handler writes the number of each signal to a pipe immediately.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType

from torchtune_adaptive.life import launcher, this_run
from torchtune_adaptive.life.this_run import THIS_RUN, Doing

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
ONE_SIGNAL_S = 1.0
"""Signals within this time count as one: Ctrl-C arrives from the terminal and again from the launcher."""
RANK_0_FIRST_S = 0.2
"""Head start of rank 0, which reports signals that all ranks receive."""
SIGNALLED_FILE = "asked"


def listen() -> None:
    """Start to handle signals, except those that the caller ignores (as nohup does)."""
    if threading.current_thread() is not threading.main_thread():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _ignored_by_the_main_thread)
            signal.siginterrupt(number, False)  # do not interrupt system calls of the main thread
    launcher.write_pid_file()
    os.register_at_fork(after_in_child=stop_listening)  # a signal to a data worker does not stop the run
    threading.Thread(target=_hear, args=(reader,), daemon=True).start()


def stop_listening() -> None:
    """Restore the default handlers, which end the process."""
    signal.set_wakeup_fd(-1)
    for number in HANDLED:
        if signal.getsignal(number) is _ignored_by_the_main_thread:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _ignored_by_the_main_thread(number: int, frame: FrameType | None) -> None: ...


def _hear(reader: int) -> None:
    first_at_s: float | None = None
    while numbers := os.read(reader, 64):
        for number in numbers:
            if number not in HANDLED:
                continue
            if first_at_s is None:
                _first(signal.Signals(number))
                first_at_s = time.monotonic()  # set last: on a slow disk the second copy could arrive late
            elif time.monotonic() - first_at_s > ONE_SIGNAL_S:
                _exit_now(signal.Signals(number))


def _first(asked_by: signal.Signals) -> None:
    if asked_by == signal.SIGTERM and launcher.peer_has_exited():
        os._exit(128 + asked_by)  # the launcher ends all ranks
    THIS_RUN.signal = asked_by
    rank, folder = int(os.environ.get("RANK", "0")), launcher.attempt_directory()
    if rank != 0:
        time.sleep(RANK_0_FIRST_S)
    # the first rank of a machine reports the signal; without a launcher, rank 0
    if rank != 0 if folder is None else not launcher.create_first(folder / SIGNALLED_FILE):
        return
    name = asked_by.name + f" on rank {rank}" * (rank != 0)
    launched = folder is not None
    time_left = f" (if torchrun forwarded the signal, it waits {launcher.launcher_timeout_s():g} s)" if launched else ""
    _say(
        f"{name}: {THIS_RUN.doing.value}; until then {THIS_RUN.saved}{time_left}. "
        "A second signal ends the run immediately"
    )
    by_torchrun = " (torchrun also sends it when another rank has exited)" * launched
    THIS_RUN.try_to_note(this_run.ASKED, f"{name}{by_torchrun}; the run was then killed without another message")


def _exit_now(asked_by: signal.Signals) -> None:
    if launcher.first_to_report():
        first = THIS_RUN.signal
        # torchrun forwards a second SIGINT as SIGTERM
        which = "again" if first in (None, asked_by) else f"after {first.name}"
        since = " since then" if THIS_RUN.newest else ""
        lost = "" if THIS_RUN.doing is Doing.SETTING_UP else f", and all training{since} is lost"
        message = f"{asked_by.name} {which}: ended immediately; {THIS_RUN.saved}{lost}"
        _say(message)
        THIS_RUN.try_to_note(this_run.ASKED, message)
    os._exit(128 + asked_by)


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        print(f"\n{line}", file=sys.stderr, flush=True)
