"""End a run with one message: that of the rank that failed first."""

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
from torchtune_adaptive.life.console import log_to_stderr
from torchtune_adaptive.life.launcher import first_to_report, write_error_file
from torchtune_adaptive.life.printing import INTERRUPTED
from torchtune_adaptive.life.signals import stop_listening
from torchtune_adaptive.life.this_run import THIS_RUN, saved_and_what_next


def exit_with_one_message(work: Callable[[], None], remedies: Mapping[Remedy, str] = KEYS) -> None:
    """Run `work`; the first rank that fails reports the error, once.

    The process group still exists then. Its threads are released, because they could abort the exiting process.
    """
    try:
        try:
            log_to_stderr()
            with explain_thread_errors():
                work()
        except AdaptiveError as error:
            stop_listening()
            if first_to_report():
                _tell(error, in_keys(error, remedies))
            _exit(1)
        except Exception as error:  # noqa: BLE001 - reported here, and the process ends
            stop_listening()
            if first_to_report():
                write_error_file(f"error (rank {rank()}): {in_a_line(error)}")
                sys.excepthook(type(error), error, error.__traceback__)
            _exit(1)
    except KeyboardInterrupt:  # possible even while another error is reported
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if first_to_report():  # every rank receives the signal, and the launcher waits
            print("\ninterrupted", file=sys.stderr, flush=True)
        _exit(INTERRUPTED)
    finally:
        let_go()


def _tell(error: AdaptiveError, message: str) -> None:
    if os.environ.get("TORCHTUNE_ADAPTIVE_TRACEBACK"):
        traceback.print_exception(error)
    passes = isinstance(error, RanksPartedError)  # the same command can resume without changes
    # before the process group exists, errors concern the config, which is the same on all ranks
    where = f" (rank {rank()})" if rank() != 0 and dist.is_initialized() else ""
    whole = f"{message}; {saved_and_what_next()}" if passes else message
    write_error_file(f"error{where}: {message}")
    print(f"\nerror{where}: {whole}", file=sys.stderr, flush=True)
    if not passes:
        THIS_RUN.note_end(this_run.ERROR, message)


def _exit(status: int) -> NoReturn:
    """Exit this rank; the launcher ends the others."""
    sys.unraisablehook = lambda _: None  # partly constructed objects may raise in __del__
    sys.exit(status)


@contextmanager
def explain_thread_errors() -> Iterator[None]:
    """Explain the errors of Python and autograd's C++ code when a thread cannot be started."""
    try:
        yield
    except RuntimeError as error:
        if str(error) not in ("can't start new thread", "Resource temporarily unavailable"):
            raise
        raise AdaptiveError(
            f"cannot start another thread ({in_a_line(error)}): free memory, or raise the limits of memory "
            "(ulimit -v) and of processes (ulimit -u)"
        ) from error


def rank() -> int:
    """Return the rank assigned by the launcher, which is known before the process group exists."""
    return int(os.environ.get("RANK", "0"))
