"""What this process knows of its run, wherever it is in it: signals and errors end a run anywhere."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from importlib import metadata
from pathlib import Path

from torchtune_adaptive.tune.start import run_file

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
LONGEST_NOTE_S = 2.0
TORCHRUN_WAITS_S = 30.0
_STARTED = 19
"""Where a process began, behind its name in /proc/PID/stat."""
_SHUTDOWN_TIMEOUT = re.compile(r"--shutdown[-_]timeout[=\0](\d+)")


class Doing(Enum):
    """Where a run is, and what a signal does to it there."""

    SETTING_UP = "the run ends as soon as the ranks can agree on it"
    TRAINING = "a checkpoint follows this step, then the run ends"
    LAST_SAVE = "all steps are done, and the run ends once its last checkpoint is saved"


@dataclass
class ThisRun:
    """There is one of it, as a process has one set of signal handlers."""

    doing: Doing = Doing.SETTING_UP
    signal: signal.Signals | None = None
    """The first that asked this rank to end the run."""
    asked_by: str = ""
    """What has ended the run, once all ranks know it: `SIGTERM`, `SIGHUP on rank 1`."""
    newest: Path | None = None
    """The newest complete checkpoint."""
    newest_step: int = 0
    """The last step that is in it."""
    places: tuple[Path, ...] = ()
    """The folders that it writes into; none before it has found out where it starts."""
    relaunched: bool = False
    """Whether a launcher of some rank has started this run before; known to rank 0."""
    _noting: threading.Lock = field(default_factory=threading.Lock)
    """A signal is noted by the thread that hears it, an end by the one that trains."""

    def note_end(self, how: str, message: str = "") -> None:
        with self._noting:
            for place in self.places:
                run_file.end(place, how, message)

    def try_to_note(self, how: str, message: str) -> None:
        """As `note_end`, where nobody may wait: the machine that hangs may be the one with the files."""
        noting = threading.Thread(target=self.note_end, args=(how, message), daemon=True)
        noting.start()
        noting.join(LONGEST_NOTE_S)

    def asked_to_stop(self) -> bool:
        return self.signal is not None

    @property
    def saved(self) -> str:
        return "nothing is saved" if self.newest is None else f"last checkpoint: {self.newest}"

    def not_saved(self, step: int) -> str:
        """What an end after this step loses: `, and steps 3 to 9 are not saved`; nothing where all is saved."""
        first = self.newest_step + 1
        if step < first:
            return ""
        return f", and step {step} is not saved" if step == first else f", and steps {first} to {step} are not saved"


THIS_RUN = ThisRun()


LAUNCHER_READS = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
"""Variables that decide how torchrun treats a lost node and a run that is asked to end."""


def command_to_go_on() -> str:
    """The command that was typed, for the run to go on where it has come to."""
    typed = as_typed()
    if "resume_from_checkpoint=auto" not in typed:
        changed = ("resume_from_checkpoint=", "overwrite_output_dir=")
        typed = [*(each for each in typed if not each.startswith(changed)), "resume_from_checkpoint=auto"]
    given = [f"{name}={os.environ[name]}" for name in LAUNCHER_READS if name in os.environ]
    return shlex.join([*given, *typed])


def saved_and_what_next() -> str:
    """The last words of a run that ends early."""
    then = "start again" if THIS_RUN.newest is None else "go on"
    return f"{THIS_RUN.saved}. To {then}: {command_to_go_on()}"


def launcher_waits_s() -> float | None:
    """How long torchrun leaves its workers to end once it is asked to; None without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    if tuple(map(int, metadata.version("torch").split(".")[:2])) < (2, 12):
        return TORCHRUN_WAITS_S  # nobody can say otherwise there
    given = _SHUTDOWN_TIMEOUT.search("\0".join(as_typed()))
    variables = (os.environ.get(name) for name in ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"))
    return float(given[1]) if given else float(next(filter(None, variables), TORCHRUN_WAITS_S))


def as_typed() -> list[str]:
    """The launcher's if there is one, else this process's, as somebody would have typed it."""
    arguments = list(sys.orig_argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError):  # no /proc: what the launcher was given is not known
            arguments = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
    interpreter, *rest = arguments
    if rest and not rest[0].startswith("-") and not rest[0].endswith(".py"):
        return [os.path.basename(rest[0]), *rest[1:]]  # a script such as tune, which knows its interpreter
    return [os.path.basename(interpreter), *rest]


def was_restarted() -> bool:
    """On rank 0: whether a launcher has started the run again, with the same command.

    Each launcher counts its own restarts, and not those for which another node has asked: rank 0's may say 0.
    """
    return THIS_RUN.relaunched or os.environ.get(RESTARTS, "0") != "0"


def launcher() -> str | None:
    """What tells the launcher of this rank from any other, on whatever machine and at whatever time; None without."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent, began = os.getppid(), ""
    with suppress(OSError):  # no /proc: two of one number are taken for one
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[_STARTED]
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {parent} {began}"
