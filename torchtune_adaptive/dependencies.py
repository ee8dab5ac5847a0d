"""Other packages: the versions that work here, the line that refuses others, and notices that no user can act on."""

import logging
import os
import re
import signal
import sys
import threading
import warnings
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

TORCH = "2.13 to 2.15"
TORCHAO = "0.13 to 0.15"
LAUNCHER_PID = "TORCHTUNE_ADAPTIVE_LAUNCHER"
"""The variable by which ranks know the process of `tune run`."""


def refuse_torch(why: str) -> NoReturn:
    _refuse(f"torch {version('torch')} does not work with torchtune-adaptive ({why}): install torch {TORCH}")


def refuse_unfit_torchao() -> None:
    """Refuses versions without names that torchtune imports; if there is none at all, torchtune says so itself."""
    with suppress(PackageNotFoundError):
        installed = version("torchao")
        if not (0, 13) <= tuple(map(int, re.findall(r"\d+", installed)[:2])) < (0, 16):
            _refuse(f"torchao {installed} does not work with torchtune: install torchao {TORCHAO}")


def _refuse(why: str) -> NoReturn:
    program = _program()
    if program in ("tune", "tune-adaptive") or program.startswith("adaptive_"):
        sys.exit(f"error: {why}")
    raise ImportError(why)


def _program() -> str:
    """Its name; an embedded interpreter may have none."""
    arguments = getattr(sys, "argv", None)
    return Path(arguments[0]).name if arguments else ""


def hide_notices() -> None:
    """Warnings about the user's own config or data are not touched."""
    # torchao looks for compiled extensions of its own that no recipe uses
    logging.getLogger("torchao").addFilter(lambda record: "cpp extensions" not in record.getMessage())
    # torchdata 0.11 calls what torch 2.13 has deprecated
    warnings.filterwarnings("ignore", message=".*set_vital.*")
    # LoRA's adapters are drawn on a CPU's mesh, for which torch has no generator that knows of shards
    warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
    # torchtune's profiler asks for XPU unless the config says otherwise
    warnings.filterwarnings("ignore", message="XPU is not available")


def end_by_ctrl_c() -> None:
    """Lets Ctrl-C end a recipe of ours without a traceback, until the recipe listens to signals itself."""
    of_ours = any(Path(word).name.startswith("adaptive_") for word in getattr(sys, "argv", None) or ())
    in_main_thread = threading.current_thread() is threading.main_thread()
    if of_ours and in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def when_tune_imports_torch() -> None:
    """torch calls this at the end of its own import (an entry point of `torch.backends`).

    In torchtune's command, no other code of ours runs before torchtune imports torchao, which prints a warning or fails
    with a traceback. Other programs are left alone.
    """
    end_by_ctrl_c()
    if _program() == "tune":
        os.environ[LAUNCHER_PID] = str(os.getpid())  # for the ranks that it starts
        hide_notices()
        refuse_unfit_torchao()
        sys.excepthook = in_place_of_torchruns_report


def in_place_of_torchruns_report(kind: type[BaseException], error: Any, trace: TracebackType | None) -> None:
    """Ends what `tune run` prints with the message of the rank that failed first, or with the signal that ended the
    run, in the place of torchrun's traceback and 20 lines."""
    if kind.__name__ == "ChildFailedError":
        rank, failure = error.get_first_failure()
        ended = failure.message if failure.exitcode < 0 else f"exit status {failure.exitcode}"
        said = failure.message["message"] if isinstance(failure.message, dict) else f"failed (rank {rank}): {ended}"
        print(f"\n{said}", file=sys.stderr)
    elif kind.__name__ == "SignalException":
        print(f"\n{error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
