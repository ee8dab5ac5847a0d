"""What this process knows of its run, wherever it is in it: signals and errors end a run anywhere."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from torchtune_adaptive.life import run_file
from torchtune_adaptive.life.launcher import command_to_go_on
from torchtune_adaptive.life.run_file import RunFile

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
LONGEST_NOTE_S = 2.0


class Doing(Enum):
    """Where a run is, and what a signal does to it there."""

    SETTING_UP = "the run ends as soon as all ranks agree"
    TRAINING = "the run saves a checkpoint after this step, then ends"
    LAST_SAVE = "all steps are done, and the run ends after its last checkpoint"


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
    finished_before: dict[Path, RunFile] = field(default_factory=dict)
    """What a finished run has left in them, to be put back where this one fails before it trains."""
    relaunched: bool = False
    """Whether a launcher of some rank has started this run before; known to rank 0."""
    _noting: threading.Lock = field(default_factory=threading.Lock)
    """A signal is noted by the thread that hears it, an end by the one that trains."""

    def note_end(self, how: str, message: str = "") -> None:
        with self._noting:
            for place in self.places:
                finished = self.finished_before.get(place)
                if finished is not None and how == run_file.ERROR and self.doing is Doing.SETTING_UP:
                    run_file.write(place, finished)
                else:
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


def saved_and_what_next() -> str:
    """The last words of a run that ends early."""
    then = "restart" if THIS_RUN.newest is None else "resume"
    return f"{THIS_RUN.saved}. To {then}: {command_to_go_on()}"


def was_restarted() -> bool:
    """On rank 0: whether a launcher has started the run again, with the same command.

    Each launcher counts its own restarts, and not those for which another node has asked: rank 0's may say 0.
    """
    return THIS_RUN.relaunched or os.environ.get(RESTARTS, "0") != "0"
