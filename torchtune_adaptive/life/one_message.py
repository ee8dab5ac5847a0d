"""One message ends a run, the last thing on the screen: that of the rank that failed first."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from torchtune_adaptive.config.components import in_a_line
from torchtune_adaptive.config.remedies import KEYS, in_keys
from torchtune_adaptive.engine.ranks import let_go
from torchtune_adaptive.errors import AdaptiveError, RanksPartedError, Remedy
from torchtune_adaptive.life import this_run
from torchtune_adaptive.life.console import show_decisions
from torchtune_adaptive.life.launcher import speaks_first, tell_the_launcher
from torchtune_adaptive.life.printing import INTERRUPTED
from torchtune_adaptive.life.signals import stop_listening
from torchtune_adaptive.life.this_run import THIS_RUN, saved_and_what_next


def ending_well(work: Callable[[], None], remedies: Mapping[Remedy, str] = KEYS) -> None:
    """Does the work. What ends it early is reported once, by the rank that met it first. The group is still there then:
    its threads are let go, or they could abort the process after its last word."""
    try:
        try:
            show_decisions()
            with telling_where_no_thread_starts():
                work()
        except AdaptiveError as error:
            stop_listening()
            if speaks_first():
                _tell(error, in_keys(error, remedies))
            _exit(1)
        except Exception as error:  # noqa: BLE001 - told here, and the process ends
            stop_listening()
            if speaks_first():
                tell_the_launcher(f"error (rank {rank()}): {in_a_line(error)}")
                sys.excepthook(type(error), error, error.__traceback__)
            _exit(1)
    except KeyboardInterrupt:  # it may also come while another error is told
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if speaks_first():  # all ranks are told at once, and the launcher waits for them
            print("\ninterrupted", file=sys.stderr, flush=True)
        _exit(INTERRUPTED)
    finally:
        let_go()


def _tell(error: AdaptiveError, message: str) -> None:
    if os.environ.get("TORCHTUNE_ADAPTIVE_TRACEBACK"):
        traceback.print_exception(error)
    passes = isinstance(error, RanksPartedError)  # the same command goes on: nothing has to be changed
    # until the ranks have met, an error is about the config, which is the same for all of them
    where = f" (rank {rank()})" if rank() != 0 and dist.is_initialized() else ""
    whole = f"{message}; {saved_and_what_next()}" if passes else message
    tell_the_launcher(f"error{where}: {message}")
    print(f"\nerror{where}: {whole}", file=sys.stderr, flush=True)
    if not passes:
        THIS_RUN.note_end(this_run.ERROR, message)


def _exit(status: int) -> NoReturn:
    """Ends this rank, whether or not it has spoken: the launcher ends the others."""
    sys.unraisablehook = lambda _: None  # what was only half built complains when it is collected
    sys.exit(status)


@contextmanager
def telling_where_no_thread_starts() -> Iterator[None]:
    """Around everything: Python, and C++ where autograd begins, name neither what was wanted nor the limit."""
    try:
        yield
    except RuntimeError as error:
        if str(error) not in ("can't start new thread", "Resource temporarily unavailable"):
            raise
        raise AdaptiveError(
            f"the system starts no further thread ({in_a_line(error)}): free memory, or raise the limits of memory "
            "(ulimit -v) and of processes (ulimit -u)"
        ) from error


def rank() -> int:
    """The rank that the launcher assigned: known before there is a process group."""
    return int(os.environ.get("RANK", "0"))
