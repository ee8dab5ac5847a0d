"""What this process knows of its run, wherever it is in it: signals and errors end a run anywhere."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from torchtune_adaptive.tune.start import run_file


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
    places: tuple[Path, ...] = ()
    """The folders that it writes into; none before it has found out where it starts."""

    def note_end(self, how: str, message: str = "") -> None:
        for place in self.places:
            run_file.end(place, how, message)

    def asked_to_stop(self) -> bool:
        return self.signal is not None

    @property
    def saved(self) -> str:
        return "nothing is saved" if self.newest is None else f"saved is {self.newest}"


THIS_RUN = ThisRun()


def command_to_go_on() -> str:
    """The command that was typed, for the run to go on where it has come to."""
    typed = _typed()
    if "resume_from_checkpoint=auto" not in typed:
        changed = ("resume_from_checkpoint=", "overwrite_output_dir=")
        typed = [*(each for each in typed if not each.startswith(changed)), "resume_from_checkpoint=auto"]
    return shlex.join(typed)


def _typed() -> list[str]:
    """The launcher's if there is one, else this process's, as somebody would have typed it."""
    arguments = list(sys.orig_argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError):  # no /proc: what the launcher was given is not known
            arguments = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
    interpreter, *rest = arguments
    if rest and not rest[0].startswith("-") and not rest[0].endswith(".py"):
        return [os.path.basename(rest[0]), *rest[1:]]  # a script such as tune, which knows its interpreter
    return [os.path.basename(interpreter), *rest]
