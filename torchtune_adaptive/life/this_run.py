"""What this process knows of its run, wherever it is in it, and what the run leaves for whoever starts it again.

Signals and errors end a run anywhere. `adaptive_run.json` has the command, its launchers, and how the run ended.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from torchtune_adaptive.atomic_files import directory_id, keep_file, of_its_types, read_json

RUN_FILE = "adaptive_run.json"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
LONGEST_NOTE_S = 2.0

ASKED, STOPPED, FINISHED, ERROR = "asked", "stopped", "finished", "error"
"""The first is what is known until the run says more: it was asked to end."""


@dataclass(frozen=True, kw_only=True)
class RunFile:
    command: str
    folder: str
    """The folder in which to type it."""
    checkpoints: str
    """The folder that they are in; from that of the run, where it is inside of it."""
    serial: int
    """Serial of the next checkpoint when the run was started: a finished one before that is not the end of this run."""
    started_at: str
    ended: str | None = None
    """One of the above; None: it runs, or something has ended it that left it no time to say so."""
    message: str = ""
    launchers: list[str] = field(default_factory=list)


def now() -> str:
    """The time, to the second, as files tell it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def begin(directory: Path, command: str, checkpoints: Path, serial: int, launchers: Iterable[str] = ()) -> None:
    here, place = directory.absolute(), checkpoints.absolute()
    run = RunFile(
        command=command,
        folder=os.getcwd(),
        checkpoints=str(place.relative_to(here) if place.is_relative_to(here) else place),
        serial=serial,
        started_at=now(),
        launchers=list(launchers),
    )
    write(directory, run)


def end(directory: Path, how: str, message: str = "") -> None:
    run = read(directory)
    if run is not None and (how != ASKED or run.ended in (None, ASKED)):
        write(directory, replace(run, ended=how, message=message))


def read(directory: Path) -> RunFile | None:
    """None where there is no file, or one that cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        return of_its_types(RunFile(**(read_json(directory / RUN_FILE) or {})))
    return None


def write(directory: Path, run: RunFile) -> None:
    """A run is worth more than a file about it, so a full disk ends none."""
    content = json.dumps(asdict(run), indent=1).encode()
    keep_file(directory / RUN_FILE, content, "`tune-adaptive status` cannot report how this run ended")


class Doing(Enum):
    """Where a run is, and what a signal does to it there."""

    SETTING_UP = "the run ends as soon as all ranks agree"
    TRAINING = "the run saves a checkpoint after this step, then ends"
    LAST_SAVE = "all steps are done, and the run ends after its last checkpoint"
    SAVED = "all steps are done, the last checkpoint is saved, and the run ends"


@dataclass
class ThisRun:
    """There is one of it, as a process has one set of signal handlers."""

    doing: Doing = Doing.SETTING_UP
    signal: signal.Signals | None = None
    """The first that asked this rank to end the run."""
    asked_by: str = ""
    """What has ended the run, once all ranks know it: `SIGTERM`, `SIGHUP on rank 1`."""
    newest: Path | None = None
    place: Path | None = None
    """The directory of `adaptive_run.json`; None before the run knows where it starts."""
    place_id: tuple[int, int] | None = None
    """Another run may start under the name of a directory that was renamed; this run does not write there."""
    finished_before: RunFile | None = None
    """What a finished run has left there, to be put back where this one fails before it trains."""
    restarted: bool = False
    """On rank 0: whether a launcher of some rank has started this run before, with the same command."""
    _noting: threading.Lock = field(default_factory=threading.Lock)
    """A signal is noted by the thread that hears it, an end by the one that trains."""

    def keep_record_in(self, directory: Path) -> None:
        """Note the directory of `adaptive_run.json`, which may be missing on other nodes than rank 0's."""
        self.place = directory
        with suppress(OSError):
            self.place_id = directory_id(directory)

    def note_end(self, how: str, message: str = "") -> None:
        with self._noting, suppress(OSError):
            if self.place is None or directory_id(self.place) != self.place_id:
                return
            if self.finished_before is not None and how == ERROR and self.doing is Doing.SETTING_UP:
                write(self.place, self.finished_before)
            else:
                end(self.place, how, message)

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


THIS_RUN = ThisRun()


def saved_and_what_next() -> str:
    """The last words of a run that ends early."""
    then = "restart" if THIS_RUN.newest is None else "resume"
    return f"{THIS_RUN.saved}. To {then}: {command_to_go_on()}"


def command_to_go_on() -> str:
    """The command that was typed, for the run to go on where it has come to."""
    typed = as_typed()
    if "resume_from_checkpoint=auto" not in typed:
        changed = ("resume_from_checkpoint=", "overwrite_output_dir=")
        typed = [*(word for word in typed if not word.startswith(changed)), "resume_from_checkpoint=auto"]
    return shlex.join(typed)


def as_typed() -> list[str]:
    """The launcher's command if there is one, else this process's, as somebody would have typed it."""
    arguments = list(sys.orig_argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError):  # no /proc: what the launcher was given is not known
            arguments = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
    interpreter, *rest = arguments
    if rest and not rest[0].startswith("-") and not rest[0].endswith(".py"):
        return [os.path.basename(rest[0]), *rest[1:]]  # a script such as tune, which knows its interpreter
    return [os.path.basename(interpreter), *rest]
