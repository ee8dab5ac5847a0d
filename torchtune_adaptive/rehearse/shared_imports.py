"""A process that imports the libraries of a script once, and forks its rehearsals, which saves CPU time.

`start.share_imports` starts it as `python -P -m ...shared_imports SCRIPT PROGRAM args`. It has null
devices, but must not use them: torch would keep their number and their memory, which differ between rehearsals.
"""

from __future__ import annotations

import ast
import gc
import os
import runpy
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from torchtune_adaptive import dependencies
from torchtune_adaptive.null_cuda import set_card
from torchtune_adaptive.rehearse import run_script, start

MEMORY, DEVICES, CAPABILITY = "NULL_CUDA_MEMORY", "NULL_CUDA_DEVICES", "NULL_CUDA_CAPABILITY"


def import_libraries(script: Path) -> None:
    """Import what a script imports outside of functions. Libraries may read the GPU's compute capability."""
    major, minor = map(int, os.environ[CAPABILITY].split("."))
    about = SimpleNamespace(major=major, minor=minor)
    importing = [True]

    def answer(function: Callable[..., Any], known: object) -> Callable[..., Any]:
        return lambda *args, **kwargs: known if importing else function(*args, **kwargs)

    known = {"get_device_capability": (major, minor), "get_device_properties": about, "current_device": 0}
    for name, value in known.items():
        setattr(torch.cuda, name, answer(getattr(torch.cuda, name), value))
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # makes is_available use NVML
    with suppress(OSError, SyntaxError, ValueError):  # the script will raise it, too
        for each in ast.parse(script.read_text()).body:
            with suppress(Exception, SystemExit):  # modules beside the script are not found
                exec(ast.unparse(each) if isinstance(each, ast.Import | ast.ImportFrom) else "", {})
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    if (interfaces := sys.modules.get("torch._dynamo.device_interface")) is not None:
        interfaces.caching_worker_device_properties.clear()
    importing.clear()


def run_here(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run a rehearsal in a child process of Popen, unless the imports used CUDA or another compute capability."""
    start.end_with_parent()
    if torch.cuda._is_in_bad_fork() or environ[CAPABILITY] != os.environ[CAPABILITY]:
        return
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # one of these tells Popen that the child is running
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the pool has replaced it by a descriptor that is now closed
    gc.freeze()  # collections skip the objects of the libraries
    gc.enable()  # Popen disables it
    dependencies.PARENT_PID = os.getppid()
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False  # temporary folders belong to the parent
    for number in signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environ)
    set_card(memory=int(environ[MEMORY]), devices=int(environ[DEVICES]))
    run_script.main(*arguments)


def main(script: str, program: str, *arguments: str) -> None:
    """Import the libraries of a script, and run a program that rehearses it."""
    gc.disable()
    run_script.replace_functions()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        import_libraries(Path(script))
    gc.enable()
    if threading.active_count() == 1:
        start.before_exec = run_here
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
