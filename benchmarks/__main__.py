"""Run the benchmarks that need no GPU, one after another. Print a table for each, and save JSON to benchmarks/results/.

    python -m benchmarks [--only NAME ...] [--pairs 5]

A benchmark is a module of this package with `run(pairs: int) -> Result`. Times are only valid on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from importlib import import_module

from benchmarks.results import save

BENCHMARKS = (
    "overhead",
    "trainer",
    "ddp",
    "searches",
    "strategies",
    "recovery",
    "packing",
    "stages",
    "rollouts",
)
BY_NAME = ("large_saves", "ghost", "mesh_overhead")
"""Benchmarks that run only if `--only` names them, because they take long or need 20 GiB of disk."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=(*BENCHMARKS, *BY_NAME), default=BENCHMARKS, metavar="NAME")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of either side; the median is shown")
    options = parser.parse_args()
    for name in options.only:
        began = time.perf_counter()
        # Imported one by one, because `searches` needs additional packages.
        result = import_module(f"benchmarks.{name}").run(options.pairs)
        written = save(name, result.rows, result.note)
        print(f"\n{name} ({time.perf_counter() - began:.0f} s, written to {written})\n{result}", flush=True)


if __name__ == "__main__":
    main()
