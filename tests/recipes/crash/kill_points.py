"""Points at which a run is killed; they are printed and can be passed on the command line."""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ORDERS = "TORCHTUNE_ADAPTIVE_TEST_KILLS"

START, TRAIN, TIME = "start", "train", "time"
"""Count file operations in output_dir since the start or since a step; or wait for milliseconds."""
PROBE, STEP = "probe", "step"
"""Count the probes of the search, or the steps of this process, once for each stage of a step."""
LAST_STEP, LAST_SAVE = "last-step", "last-save"
"""The last stage of the last step; and the operations of the save after it."""
STAGES = (START, TRAIN, TIME, PROBE, STEP, LAST_STEP, LAST_SAVE)

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


def parse_point(text: str) -> Point:
    place, *marks = text.split("/")
    stage, _, at = place.partition(":")
    assert stage in STAGES, f"{text}: a point is STAGE:N, of {', '.join(STAGES)}"
    ranks = [int(mark.removeprefix("rank")) for mark in marks if mark.startswith("rank")]
    blows = [mark for mark in marks if mark in (TERM, INT)]
    return Point(
        stage,
        int(at),
        torn="torn" in marks,
        cut="cut" in marks,
        rank=ranks[0] if ranks else 0,
        launcher="launcher" in marks,
        blow=blows[0] if blows else KILL,
    )


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
    restart: int = 0
    """The attempt of the launcher in which to strike."""

    @property
    def notes_folder(self) -> Path:
        return Path(self.notes)


def write_orders(orders: list[Order]) -> str:
    return json.dumps([asdict(order) for order in orders])


def read_order() -> Order | None:
    """Read the order of this process from its environment."""
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    orders = [Order(**fields) for fields in json.loads(os.environ.get(ORDERS, "[]"))]
    for order in orders:
        if order.restart == restart:
            return replace(order, point=Point(**order.point) if isinstance(order.point, dict) else None)
    return None
