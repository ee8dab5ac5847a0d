"""How ranks end: with one message for all of them, and no later than the launcher that started them."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from torchtune_adaptive.errors import AdaptiveError, EarlyExitError
from torchtune_adaptive.life.this_run import THIS_RUN

UNTIL_ENDED_S = 10.0
"""How long a rank without a message waits to be ended by the launcher, so that the rank that spoke ends first."""
NOBODY_READS = 141
"""The exit status that shells give to a command whose pipe was closed."""
INTERRUPTED = 130
"""The exit status that shells give to a command ended by Ctrl-C."""
_PR_SET_PDEATHSIG = 1


def speaks_first() -> bool:
    """Whether this rank is the first of its machine to report a failure.

    The first to make a file in the launcher's own directory speaks. It is the one that failed: its peers lose their
    connections to it later, when its process ends. Without such a launcher ranks cannot know of each other, and each
    speaks.
    """
    told = _told_file(os.environ)
    return told is None or int(os.environ.get("WORLD_SIZE", "1")) == 1 or makes_first(told)


def makes_first(file: Path) -> bool:
    """Makes a file; whether nobody had before, or that cannot be told: a message twice is better than none."""
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def end_silently() -> None:
    """Ends a rank for which another has spoken."""
    sys.unraisablehook = lambda _: None
    if not THIS_RUN.asked_to_stop():  # else the launcher has done what it can
        time.sleep(UNTIL_ENDED_S)
    sys.exit(1)


@contextmanager
def printing() -> Iterator[None]:
    """Around what prints a result: a reader who has seen enough, as `| head`, a full disk, or a terminal without the
    letters of a path is no traceback."""
    if sys.stdout is None:  # closed before the start, as by `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the end of the process
    with suppress(OSError):  # what was a file at the start, and is a pipe now, cannot be asked where it is
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _print_nowhere()
        sys.exit(NOBODY_READS)
    except OSError as error:
        if error.filename is not None:  # a file, and not what is printed
            raise
        _print_nowhere()
        raise AdaptiveError(f"cannot write the output: {error.strerror}; redirect it elsewhere") from error


def _print_nowhere() -> None:
    """What is still to be flushed would fail once more when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def refusing_early_exits() -> Iterator[None]:
    """Makes `sys.exit(0)` an error: called in a dataset, say, it would report success for no training."""
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        called = traceback.extract_tb(error.__traceback__)[-1]
        raise EarlyExitError(
            f"sys.exit({error.code!r}) in {called.name} ({called.filename}, line {called.lineno}) ended the run early; "
            "raise an error there, or return"
        ) from error


def end_with_the_launcher() -> None:
    """Makes the kernel end this rank as soon as torchrun is gone, even by SIGKILL."""
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    with suppress(OSError, AttributeError):  # a C library without prctl: as without this function
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it was gone before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


def attempt_folder(environment: Mapping[str, str]) -> Path | None:
    """Torchrun's folder for this machine's ranks; every restart has a new one."""
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parents[1] if error_file else None


def somebody_told(environment: Mapping[str, str]) -> bool:
    """Whether some rank of this attempt has spoken of its failure."""
    told = _told_file(environment)
    return told is not None and told.exists()


def _told_file(environment: Mapping[str, str]) -> Path | None:
    folder = attempt_folder(environment)
    return folder / "told" if folder else None
