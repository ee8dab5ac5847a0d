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
from functools import partial
from pathlib import Path

from tests.recipes.crash.chain import Tally, follow
from tests.recipes.crash.full_disks import disk_cases
from tests.recipes.crash.plans import FULL, LORA, PLANS, scout
from tests.recipes.crash.runs import FORKED, KILLED, STOPPED, folder_of

LEAST = {KILLED: 200, f"{KILLED} by tune run": 50, STOPPED: 40, f"{STOPPED} by tune run": 12}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="prefix of the name of a plan, or disk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="start no further run after this time")
    parser.add_argument("--lanes", type=int, default=2, help="number of parallel jobs: most have one process")
    options = parser.parse_args()
    began, tally = time.monotonic(), Tally()
    deadline = began + 60 * options.minutes
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.lanes) as pool:
        folder = Path(name)
        plans = [plan for plan in PLANS if str(plan).startswith(options.only)]
        disks = [variant for variant in (FULL, LORA) if f"disk {variant}".startswith(options.only)]
        kinds = dict.fromkeys(
            [*((variant, FORKED) for variant in disks), *((plan.variant, plan.way) for plan in plans)]
        )
        undisturbed = [folder_of(variant, folder) / f"undisturbed {way}".replace(" ", "-") for variant, way in kinds]
        scouts = dict(zip(kinds, pool.map(scout, *zip(*kinds, strict=True), undisturbed), strict=True))
        jobs: list[Callable[[], Tally]] = [
            *(
                partial(disk_cases, variant, folder / f"disk-{variant.kind}", scouts[variant, FORKED].folder)
                for variant in disks
            ),
            *(partial(follow, plan, scouts[plan.variant, plan.way], folder, options.seed, deadline) for plan in plans),
        ]
        for each in pool.map(lambda job: job(), jobs):
            tally.add(each)
    for fault in tally.faults:
        print(f"FAULT {fault}")
    too_few = [name for name, least in LEAST.items() if tally.counts[name] < least and not options.only]
    if too_few:
        print(f"too few: {too_few}, wanted {LEAST}")
    print(f"{tally.summary()} (seed {options.seed}, {time.monotonic() - began:.0f} s)")
    return 0 if tally.good and not too_few else 1


if __name__ == "__main__":
    sys.exit(main())
