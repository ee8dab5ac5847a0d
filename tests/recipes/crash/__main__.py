"""Hundreds of `kill -9`, each victim being the last one's resume: nothing may be lost, and nothing be wrong.

    python -m tests.recipes.crash [--only "full/2/rows"] [--seed 3] [--at train:17/torn [--tune-run]] [--minutes 60]

Small runs of both recipes are killed at every operation of a save (in the midst of writing, while syncing, renaming,
pruning), of the start after it, and at random moments, through forked ranks and through `tune run`; also with a
launcher that starts killed ranks again, and on disks that are full or read-only. At the end of each run its weights and
figures have to be, bit by bit, those of the run that nobody has disturbed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.recipes.crash.disks import disk_cases
from tests.recipes.crash.plans import Plan, Session, all_plans, exactly
from tests.recipes.crash.points import parse_point
from tests.recipes.crash.restarts import restarted
from tests.recipes.crash.tally import Tally
from tests.recipes.crash.variants import FULL, LORA, VARIANTS, Variant

LEAST_KILLS, LEAST_BY_TUNE_RUN = 200, 60


def main() -> int:
    options = read_options()
    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Path(folder), options.seed, began + 60 * options.minutes, tally)
        for plan in chosen(options):
            print(f"{plan} ({time.monotonic() - began:.0f} s)", flush=True)
            session.follow(plan)
        if not options.only or "restarts" in options.only:
            for variant in (Variant("full", 2), Variant("lora", 2, budget=True)):
                reference = session.reference(variant)
                restarted(variant, Path(folder) / f"restarts-{variant.kind}", reference, tally)
        if not options.only or "disk" in options.only:
            references = {variant: session.reference(variant) for variant in (FULL, LORA)}
            print("\n".join(disk_cases(Path(folder) / "disks", references, tally)), flush=True)
    return report(tally, session, whole=not options.only, seconds=time.monotonic() - began)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the beginning of a plan's name; restarts; disk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at", type=parse_point, help="only there, in a run that has not been killed before")
    parser.add_argument("--tune-run", action="store_true", help="with --at: through the launcher")
    parser.add_argument("--minutes", type=float, default=60, help="after which no new kill begins")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Plan]:
    if options.at is not None:
        variants = [variant for variant in VARIANTS if options.only.startswith(str(variant))]
        assert variants, f"--at needs --only with one of {', '.join(map(str, VARIANTS))}"
        return [Plan("once", variants[0], exactly(options.at), tune_run=options.tune_run)]
    return [plan for plan in all_plans() if str(plan).startswith(options.only)]


def report(tally: Tally, session: Session, *, whole: bool, seconds: float) -> int:
    for where, count in sorted(tally.places.items()):
        print(f"  {count:3} × {where}")
    print("\n".join(tally.details()))
    enough = not whole or (tally.killed >= LEAST_KILLS and tally.by_tune_run >= LEAST_BY_TUNE_RUN)
    if not enough:
        print(f"too few kills: {LEAST_KILLS} are to be, {LEAST_BY_TUNE_RUN} of them through tune run")
    print(f"{tally.summary()} (seed {session.seed}, {seconds:.0f} s)")
    return 0 if tally.good and enough else 1


if __name__ == "__main__":
    sys.exit(main())
