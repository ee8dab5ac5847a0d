"""`make faults`: run out of memory at operations of a step, and compare the gradients.

python -m tests.distributed.faults                     12 operations of every case, evenly spread; each case starts
                                                       one operation later than the case before
python -m tests.distributed.faults --at-most 50        50 operations of every case
python -m tests.distributed.faults --all               every operation of every case: more than a day
python -m tests.distributed.faults --case lora         only the cases whose name contains "lora"
python -m tests.distributed.faults --case hybrid --ranks 8
python -m tests.distributed.faults --case recipes      only the stages of DPO and PPO
python -m tests.distributed.faults --case torchtitan   torchtitan's models; needs torchtitan 0.3.0
"""

import argparse
import sys
import time
from dataclasses import replace

from benchmarks.results import save
from tests.distributed.faults.scenarios import SCENARIOS
from tests.distributed.faults.sweeps import FIGURES, Outcome, outcome_of


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--at-most", type=int, default=12, help="operations to try in one case")
    arguments.add_argument("--all", dest="at_most", action="store_const", const=sys.maxsize, help="try every operation")
    arguments.add_argument("--case", default="", help="only cases whose name contains this")
    arguments.add_argument("--timeout", type=float, default=900, help="seconds per case, on an idle machine")
    arguments.add_argument("--ranks", type=int, help="run the named cases on this many ranks")
    options = arguments.parse_args()
    total, rows = Outcome(), []
    for number, case in enumerate(SCENARIOS.values()):
        if options.case not in case.name:
            continue
        if options.ranks:
            case = replace(case, world_size=options.ranks)
        started = time.monotonic()
        outcome = outcome_of(case, options.at_most, number, options.timeout)
        total = Outcome(*map(sum, zip(total, outcome, strict=True)))
        rows.append({"case": case.name, "every": case.stride, **dict(zip(FIGURES, outcome, strict=True))})
        print(f"{outcome}  {case.name} ({time.monotonic() - started:.0f} s)", flush=True)
    print(total)
    if not options.case:
        most = "" if options.at_most == sys.maxsize else f"; at most {options.at_most} per case, evenly spread"
        save("faults", rows, f"every: 1 is every operation of a step, 3 every third{most}")
    return 0 if total.all_recovered else 1


if __name__ == "__main__":
    sys.exit(main())
