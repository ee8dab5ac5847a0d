"""What has come of all kills."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    killed: int = 0
    by_tune_run: int = 0
    resumed: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    steps_lost: Counter[str] = field(default_factory=Counter)
    """The most by name of the variant."""
    too_many_lost: list[str] = field(default_factory=list)
    places: Counter[str] = field(default_factory=Counter)
    """Where runs were killed, with numbers left out."""

    def kill(self, where: str, *, tune_run: bool) -> None:
        self.killed += 1
        self.by_tune_run += tune_run
        self.places[place(where)] += 1

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

    @property
    def good(self) -> bool:
        return self.killed == self.resumed and not (self.lost or self.wrong or self.too_many_lost)

    def summary(self) -> str:
        waited = max((lost for name, lost in self.steps_lost.items() if not name.startswith("async")), default=0)
        on_its_way = max((lost for name, lost in self.steps_lost.items() if name.startswith("async")), default=0)
        return (
            f"killed {self.killed} ({self.by_tune_run} by tune run), resumed {self.resumed}, lost {len(self.lost)}, "
            f"wrong {len(self.wrong)}, steps lost at most {waited} (asynchronous: {on_its_way})"
        )

    def details(self) -> list[str]:
        return [
            *(f"LOST {case}" for case in self.lost),
            *(f"WRONG {case}" for case in self.wrong),
            *(f"TOO MANY STEPS {case}" for case in self.too_many_lost),
        ]


def place(where: str) -> str:
    """What kind of place it is: `rename epoch_N`."""
    label = re.sub(r"^(start|train):\d+ ", r"\1 ", where)
    return re.sub(r"[0-9a-f]{8,}|\d+(\.\d+)?", "N", label)
