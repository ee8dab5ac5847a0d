"""Results of all kills and signals."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    killed: int = 0
    by_tune_run: int = 0
    """Kills of a `tune run`."""
    stopped: int = 0
    """Ended by a signal that can be handled, before the run was finished."""
    stopped_by_tune_run: int = 0
    resumed: int = 0
    """Resumed after a kill or a signal."""
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    not_begun: list[str] = field(default_factory=list)
    """Not started for lack of time."""
    steps_lost: Counter[str] = field(default_factory=Counter)
    """The maximum by name of the variant."""
    too_many_lost: list[str] = field(default_factory=list)
    places: Counter[str] = field(default_factory=Counter)
    """Places of kills and signals, without numbers."""

    def kill(self, where: str, *, tune_run: bool) -> None:
        self.killed += 1
        self.by_tune_run += tune_run
        self.places[place(where)] += 1

    def stop(self, where: str, *, tune_run: bool) -> None:
        self.stopped += 1
        self.stopped_by_tune_run += tune_run
        self.places[f"signalled at {place(where)}"] += 1

    def lose(self, case: str) -> None:
        print(f"LOST {case}", flush=True)
        self.lost.append(case)

    def fault(self, case: str) -> None:
        print(f"WRONG {case}", flush=True)
        self.wrong.append(case)

    def steps(self, variant: str, lost: int, at_risk: int, how: str) -> None:
        self.steps_lost[variant] = max(self.steps_lost[variant], lost)
        if lost > at_risk:
            self.too_many_lost.append(f"{how}: {lost} steps, at most {at_risk} may be")

    def add(self, other: Tally) -> None:
        """Add the results of other runs."""
        for name, value in vars(other).items():
            if name == "steps_lost":
                self.steps_lost |= value
            else:
                setattr(self, name, getattr(self, name) + value)

    @property
    def good(self) -> bool:
        all_resumed = self.killed + self.stopped == self.resumed
        return all_resumed and not (self.lost or self.wrong or self.too_many_lost or self.not_begun)

    def summary(self) -> str:
        return (
            f"killed {self.killed} ({self.by_tune_run} by tune run), stopped by signals {self.stopped} "
            f"({self.stopped_by_tune_run} by tune run), resumed {self.resumed}, "
            f"lost {len(self.lost)}, wrong {len(self.wrong)}, "
            f"steps lost at most {max(self.steps_lost.values(), default=0)}"
        )

    def details(self) -> list[str]:
        return [
            *(f"LOST {case}" for case in self.lost),
            *(f"WRONG {case}" for case in self.wrong),
            *(f"TOO MANY STEPS {case}" for case in self.too_many_lost),
            *(f"NOT BEGUN {case}" for case in self.not_begun),
        ]


def place(where: str) -> str:
    """Return the kind of a place, for example `rename epoch_N`."""
    label = re.sub(r"^(start|train|last-save):\d+ ", r"\1 ", where)
    return re.sub(r"[0-9a-f]{8,}|\d+(\.\d+)?", "N", label)
