"""Where a run is killed, as it is printed and can be given again on the command line."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ORDERS = "TORCHTUNE_ADAPTIVE_TEST_KILLS"

START, TRAIN, TIME = "start", "train", "time"
"""Counted are operations on files of output_dir: from the start on, from a step on; or milliseconds."""


@dataclass(frozen=True)
class Point:
    """For example `train:17`, before the 17th operation; `train:17/torn`, within it; `time:1250/rank1`."""

    stage: str
    at: int
    torn: bool = False
    """Half of what the operation writes is written."""
    cut: bool = False
    """As where the power fails: what has not been synced is empty afterwards."""
    rank: int = 0
    """Who is killed. Operations are counted on rank 0, whoever it is."""

    def __str__(self) -> str:
        marks = "/torn" * self.torn + "/cut" * self.cut + f"/rank{self.rank}" * (self.rank > 0)
        return f"{self.stage}:{self.at}{marks}"


def parse_point(text: str) -> Point:
    place, *marks = text.split("/")
    stage, _, at = place.partition(":")
    assert stage in (START, TRAIN, TIME), f"{text}: a point is start:N, train:N or time:MILLISECONDS"
    ranks = [int(mark.removeprefix("rank")) for mark in marks if mark.startswith("rank")]
    return Point(stage, int(at), torn="torn" in marks, cut="cut" in marks, rank=ranks[0] if ranks else 0)


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
