"""Points at which a run is killed, as they are printed."""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ORDER = "TORCHTUNE_ADAPTIVE_TEST_KILL"

START, TRAIN, TIME = "start", "train", "time"
"""Count file operations in output_dir since the start or since a step; or wait for milliseconds."""
PROBE, STEP = "probe", "step"
"""Count the probes of the search, or the steps of this process, once for each stage of a step."""
LAST_STEP, LAST_SAVE = "last-step", "last-save"
"""The last stage of the last step; and the operations of the save after it."""

KILL, TERM, INT = "KILL", "TERM", "INT"
"""The signal to send."""


@dataclass(frozen=True)
class Point:
    """For example `train:17`, before the 17th operation; `train:17/torn`, within it; `step:2/TERM/launcher`."""

    stage: str
    at: int
    torn: bool = False
    """Write half of the data of this operation."""
    cut: bool = False
    """Simulate a power failure: unsynced files are empty afterwards."""
    rank: int = 0
    """The rank that receives the signal. Operations are always counted on rank 0."""
    launcher: bool = False
    """Send the signal to the launcher instead of a rank."""
    blow: str = KILL

    def __str__(self) -> str:
        marks = "/torn" * self.torn + "/cut" * self.cut + f"/{self.blow}" * (self.blow != KILL)
        return f"{self.stage}:{self.at}{marks}{f'/rank{self.rank}' * (self.rank > 0)}{'/launcher' * self.launcher}"

    @property
    def asks(self) -> bool:
        """True if the signal asks the run to end, unlike a kill."""
        return self.blow in (TERM, INT)


@dataclass(frozen=True)
class Order:
    """Instructions for a run."""

    point: Point | None
    watched: str
    """The folder whose operations are counted."""
    notes: str
    """The folder for the log of the hook and the process IDs of the ranks."""
    after_step: int
    """The step after which `train` begins."""

    @property
    def notes_folder(self) -> Path:
        return Path(self.notes)


def write_order(order: Order) -> str:
    return json.dumps(asdict(order))


def read_order() -> Order | None:
    """Read the order of this process from its environment."""
    if ORDER not in os.environ:
        return None
    order = Order(**json.loads(os.environ[ORDER]))
    return replace(order, point=Point(**order.point) if isinstance(order.point, dict) else None)
