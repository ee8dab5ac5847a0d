"""Hundreds of `kill -9` and signals; each run resumes the last one. No training may be lost and no result may be
wrong.

    python -m tests.recipes.crash [--only "full/2/rows"] [--seed 3] [--minutes 60]

Small runs of the recipes are killed at every operation of a save (during writing, syncing, renaming and pruning), of
the next start, and at random times, with forked ranks and with `tune run`; also on full or read-only disks. SIGTERM and
SIGINT ask them to end at any point. At the end of each run its weights and figures have to equal, bit by bit, those of
an undisturbed run.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.recipes.crash.full_disks import disk_cases
from tests.recipes.crash.plans import all_plans
from tests.recipes.crash.session import Session
from tests.recipes.crash.summary import Tally
from tests.recipes.crash.variants import FULL, LORA, Variant

LEAST_KILLS, LEAST_BY_TUNE_RUN, LEAST_STOPS, LEAST_STOPS_BY_TUNE_RUN = 200, 60, 40, 12
LANES = 2
"""Parallel jobs: one per core, because most jobs have one process."""


@dataclass(frozen=True)
class Job:
    name: str
    run: Callable[[], Tally]


def main() -> int:
    options = read_options()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Path(folder), options.seed, began + 60 * options.minutes)

        def run(job: Job) -> Tally:
            if time.monotonic() > session.deadline:
                return Tally(not_begun=[job.name])
            print(f"{job.name} ({time.monotonic() - began:.0f} s)", flush=True)
            return job.run()

        tally = Tally()
        with ThreadPoolExecutor(options.lanes) as pool:
            for each in pool.map(run, chosen(options, session)):
                tally.add(each)
    return report(tally, whole=not options.only, how=f"seed {options.seed}, {time.monotonic() - began:.0f} s")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="prefix of the name of a plan, or disk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="start no further run after this time")
    parser.add_argument("--lanes", type=int, default=LANES, help="number of parallel jobs")
    return parser.parse_args()


def chosen(options: argparse.Namespace, session: Session) -> list[Job]:
    disks = [Job(f"disk {variant}", partial(disk_cases_of, session, variant)) for variant in (FULL, LORA)]
    plans = [Job(str(plan), partial(session.follow, plan)) for plan in all_plans()]
    return [job for job in [*disks, *plans] if job.name.startswith(options.only)]


def disk_cases_of(session: Session, variant: Variant) -> Tally:
    folder = session.folder / f"disk-{variant}".replace("/", "-")
    return disk_cases(variant, folder, session.reference(variant))


def report(tally: Tally, *, whole: bool, how: str) -> int:
    for where, count in sorted(tally.places.items()):
        print(f"  {count:3} × {where}")
    print("\n".join(tally.details()))
    wanted = {
        "kills": (tally.killed, LEAST_KILLS),
        "kills through tune run": (tally.by_tune_run, LEAST_BY_TUNE_RUN),
        "signals": (tally.stopped, LEAST_STOPS),
        "signals through tune run": (tally.stopped_by_tune_run, LEAST_STOPS_BY_TUNE_RUN),
    }
    too_few = [f"too few {name}: {count}, wanted {least}" for name, (count, least) in wanted.items() if count < least]
    print("\n".join(too_few if whole else []))
    print(f"{tally.summary()} ({how})")
    return 0 if tally.good and not (whole and too_few) else 1


if __name__ == "__main__":
    sys.exit(main())
