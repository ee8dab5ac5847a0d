"""Where a run is killed, as it is printed and can be given again on the command line."""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ORDERS = "TORCHTUNE_ADAPTIVE_TEST_KILLS"

START, TRAIN, TIME = "start", "train", "time"
"""Counted are operations on files of output_dir: from the start on, from a step on; or milliseconds."""
PROBE, STEP = "probe", "step"
"""Counted are the probes of the search, and the steps, of this life; of a step that has stages, each of them."""
LAST_STEP, LAST_SAVE = "last-step", "last-save"
"""The last step of the run, in its last stage; and the operations of the save after it."""
STAGES = (START, TRAIN, TIME, PROBE, STEP, LAST_STEP, LAST_SAVE)

KILL, TERM, INT = "KILL", "TERM", "INT"
"""The signal that comes there."""


@dataclass(frozen=True)
class Point:
    """For example `train:17`, before the 17th operation; `train:17/torn`, within it; `step:2/TERM/launcher`."""

    stage: str
    at: int
    torn: bool = False
    """Half of what the operation writes is written."""
    cut: bool = False
    """As where the power fails: what has not been synced is empty afterwards."""
    rank: int = 0
    """Who is struck. Operations are counted on rank 0, whoever it is."""
    launcher: bool = False
    """It is not a rank that is struck, but what has started them."""
    blow: str = KILL

    def __str__(self) -> str:
        marks = "/torn" * self.torn + "/cut" * self.cut + f"/{self.blow}" * (self.blow != KILL)
        return f"{self.stage}:{self.at}{marks}{f'/rank{self.rank}' * (self.rank > 0)}{'/launcher' * self.launcher}"

    @property
    def asks(self) -> bool:
        """Whether it asks a run to end, which a kill does not."""
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
    """What a victim is told."""

    point: Point | None
    watched: str
    """The folder on which operations count."""
    notes: str
    """The folder for what the trap has seen, and for the process ids of the ranks."""
    after_step: int
    """The step after which `train` begins."""
    restart: int = 0
    """The attempt of the launcher that it is for."""

    @property
    def notes_folder(self) -> Path:
        return Path(self.notes)


def write_orders(orders: list[Order]) -> str:
    return json.dumps([asdict(order) for order in orders])


def read_order() -> Order | None:
    """This process's, from its environment."""
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    orders = [Order(**fields) for fields in json.loads(os.environ.get(ORDERS, "[]"))]
    for order in orders:
        if order.restart == restart:
            return replace(order, point=Point(**order.point) if isinstance(order.point, dict) else None)
    return None
