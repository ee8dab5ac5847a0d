"""Signals that ask a run to end: the ranks agree on the first at their next step, a second ends this rank at once.

A thread hears them. Python runs handlers in the main thread only, which may be inside a collective for long, but its
own handler in C writes the number of every signal into a pipe at once.
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
"""Ctrl-C comes from the terminal and from the launcher, a scheduler's signal to launcher and ranks: that is one."""
RANK_0_FIRST_S = 0.2
"""What comes to all ranks is told by rank 0."""
ASKED_FILE = "asked"


def listen() -> None:
    """Starts to listen to signals. What the caller has set to be ignored, as nohup does, stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave_it_to_the_thread)
            signal.siginterrupt(number, False)  # nor is a system call in the main thread disturbed
    launcher.note_own_pid()
    os.register_at_fork(after_in_child=stop_listening)  # a data worker that is told to end is no end of the run
    threading.Thread(target=_hear, args=(reader,), daemon=True).start()


def stop_listening() -> None:
    """Signals end the process again: nothing more will be agreed on."""
    signal.set_wakeup_fd(-1)
    for number in HANDLED:
        if signal.getsignal(number) is _leave_it_to_the_thread:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _leave_it_to_the_thread(number: int, frame: FrameType | None) -> None: ...


def _hear(reader: int) -> None:
    first_at_s: float | None = None
    while numbers := os.read(reader, 64):
        for number in numbers:
            if number not in HANDLED:
                continue
            if first_at_s is None:
                _first(signal.Signals(number))
                first_at_s = time.monotonic()  # afterwards: a note on a slow disk would make its copy a second one
            elif time.monotonic() - first_at_s > ONE_SIGNAL_S:
                _end_at_once(signal.Signals(number))


def _first(asked_by: signal.Signals) -> None:
    if asked_by == signal.SIGTERM and launcher.a_peer_has_failed():
        os._exit(128 + asked_by)  # the launcher ends the others then: there is nobody to agree with
    THIS_RUN.signal = asked_by
    rank, folder = int(os.environ.get("RANK", "0")), launcher.attempt_folder()
    if rank != 0:
        time.sleep(RANK_0_FIRST_S)
    # the first of its machine to be asked says so; without a launcher's folder that is rank 0, if any
    if rank != 0 if folder is None else not launcher.makes_first(folder / ASKED_FILE):
        return
    name = asked_by.name + f" on rank {rank}" * (rank != 0)
    launched = folder is not None
    time_left = f" (if torchrun forwarded the signal, it waits {launcher.launcher_waits_s():g} s)" if launched else ""
    _say(
        f"{name}: {THIS_RUN.doing.value}; until then {THIS_RUN.saved}{time_left}. "
        "A second signal ends the run immediately"
    )
    by_torchrun = " (torchrun also sends it when another rank has exited)" * launched
    THIS_RUN.try_to_note(this_run.ASKED, f"{name}{by_torchrun}; the run was then killed without another message")


def _end_at_once(asked_by: signal.Signals) -> None:
    if launcher.speaks_first():
        first = THIS_RUN.signal
        # a launcher that is asked twice by SIGINT passes on SIGTERM the second time
        which = "again" if first in (None, asked_by) else f"after {first.name}"
        since = " since then" if THIS_RUN.newest else ""
        lost = "" if THIS_RUN.doing is Doing.SETTING_UP else f", and all training{since} is lost"
        message = f"{asked_by.name} {which}: ended immediately; {THIS_RUN.saved}{lost}"
        _say(message)
        THIS_RUN.try_to_note(this_run.ASKED, message)
    os._exit(128 + asked_by)


def _say(line: str) -> None:
    with suppress(OSError):  # a terminal that has hung up takes no more lines
        print(f"\n{line}", file=sys.stderr, flush=True)
