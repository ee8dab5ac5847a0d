"""What microbatches communicate, noted from those that have run, so that others can be finished."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torchtune_adaptive.comm.counting import Collective


class Schedule(NamedTuple):
    """What one microbatch communicates, on every rank alike."""

    collectives: tuple[Collective, ...]
    messages: tuple[int, ...]
    """How many messages the process groups count for each of them."""


@dataclass
class CollectiveRecord:
    """What the microbatches of a stage communicate."""

    trained: tuple[bool, ...]
    """Flags of the weights that are trained while it holds."""
    schedules: dict[bool, Schedule] = field(default_factory=dict)
    """One schedule for the last microbatch of a step, one for all others. They differ only where gradients are summed
    over replicas, which can wait for the last; elsewhere every microbatch counts as last."""
    varies: bool = False
    unsteady: str | None = None
    """Why microbatches communicate differently, where FSDP was told so."""
    foreign: int = 0
    """Messages of one microbatch that are not FSDP's."""
    names: tuple[str, ...] = ()
    """What asked for them."""
    listened: bool = False
    """Whether a microbatch was listened to for those names."""
