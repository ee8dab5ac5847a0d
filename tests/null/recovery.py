"""Out-of-memory errors of torch's allocator at every tenth operation of a step, in the recipes.

python -m tests.null.recovery                 every case; writes benchmarks/results/null_recovery_VERSION.json
python -m tests.null.recovery --every 50      every fiftieth operation
python -m tests.null.recovery --case dpo      only the cases whose name contains "dpo"
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.results import save
from tests.null.full_card import PPO, Outcome, sweep
from tests.null.processes import OnNull, null_processes


class Case(NamedTuple):
    kind: str
    ranks: int = 1
    expandable: bool = False
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        ranks = f"{self.ranks} gloo ranks" if self.ranks > 1 else "1 process"
        segments = ["expandable segments"] if self.expandable else []
        return ", ".join([self.kind, ranks, *segments, *self.overrides])


CASES = (
    Case("full"),
    Case("full", expandable=True),
    Case("full", 2),
    Case("full", 2, expandable=True),
    Case("full", 3),
    Case("full", overrides=("enable_activation_checkpointing=True", "enable_activation_offloading=True")),
    Case("lora"),
    Case("lora", 2),
    Case("full_dpo"),
    Case("full_dpo", 2),
    Case("lora_dpo"),
    Case(PPO),
    Case(PPO, 2),
)


class Counted(NamedTuple):
    operations: int
    """Tried."""
    recovered: int
    """Operations that led to a recovery on every rank; after the others, the card was not used."""
    left_over: int
    """The largest additional memory of a repeated attempt at its start, on any rank."""
    most_left_over_bytes: int
    wrong: int
    """Ranks disagree on recoveries or positions, or memory stays allocated after the step."""


def count(outcomes: list[tuple[Outcome, ...]]) -> Counted:
    """Count the outcomes, given those of every rank for each operation."""
    left = [max(each.left_over_bytes for each in ranks) for ranks in outcomes]
    return Counted(
        operations=len(outcomes),
        recovered=sum(all(each.recoveries == 1 for each in ranks) for ranks in outcomes),
        left_over=sum(each > 0 for each in left),
        most_left_over_bytes=max(left),
        wrong=sum(
            len({(each.recoveries, each.position) for each in ranks}) > 1
            or max(each.recoveries for each in ranks) > 1
            or any(each.kept_bytes > 0 for each in ranks)
            for ranks in outcomes
        ),
    )


def run(on_null: OnNull, case: Case, every: int, timeout_s: float = 900) -> Counted:
    with tempfile.TemporaryDirectory() as folder:
        run_in = str(Path(folder) / "run")
        found = on_null(
            sweep, case.kind, run_in, every, case.expandable, case.overrides, ranks=case.ranks, timeout_s=timeout_s
        )
    return count(list(zip(*(found if case.ranks > 1 else [found]), strict=True)))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--every", type=int, default=10, help="step size in operations (default: 10)")
    arguments.add_argument("--case", default="", help="only cases whose name contains this")
    options = arguments.parse_args()
    rows, name = [], f"null_recovery_{torch.__version__.split('+')[0]}"
    note = f"every {options.every}th operation of a step; the card is full from there to the end of the pass"
    with null_processes() as on_null:
        for case in (case for case in CASES if options.case in str(case)):
            began = time.monotonic()
            counted = run(on_null, case, options.every)
            rows.append({"case": str(case), **counted._asdict()})
            print(f"{case}: {counted._asdict()} ({time.monotonic() - began:.0f} s)", flush=True)
            if not options.case:
                save(name, rows, note)
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
