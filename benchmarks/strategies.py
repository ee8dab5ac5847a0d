"""Compare the strategies of `use_maximum_batch_size`: their probes, their duration and their results.

    python -m benchmarks --only strategies

The demo's config runs on two ranks with 64 MiB per rank and 256 tokens a row, without rounding. Brute force measures 1,
2, 3, ... rows until one does not fit, so its result is correct. Seconds are those of the whole search, during which a
run waits.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.results import Result
from tests.ranks import run_on_ranks
from tests.recipes.recorders import search_results
from tests.recipes.running import demo_config, load_ours
from torchtune_adaptive.engine.search import STRATEGIES, History
from torchtune_adaptive.loop import batch_size

RANKS = 2
BRUTE_FORCE = "brute force"
SEARCHES = (BRUTE_FORCE, "linear", "binary", "decrease")
SEARCHING = (
    "use_maximum_batch_size=True",
    "adaptive.memory_limit=64MiB",
    "adaptive.sequence_length=256",
    "adaptive.round_to=none",
    "dataset.samples=128",
)


def one_more(history: History) -> int | None:
    return None if history.rejected else len(history.probes) + 1


def search(kind: str, folder: Path, name: str) -> float:
    """Collective: set up a run without training it; return the seconds of its search."""
    seconds = 0.0
    wanted = batch_size.search_rows

    def timed(*args: Any, **options: Any) -> Any:
        nonlocal seconds
        started = time.perf_counter()
        rows = wanted(*args, **options)
        seconds = time.perf_counter() - started
        return rows

    stand_in, strategy = ({"binary": one_more}, "binary") if name == BRUTE_FORCE else ({}, name)
    with mock.patch.dict(STRATEGIES, stand_in), mock.patch.object(batch_size, "search_rows", timed):
        recipe = load_ours(kind)(demo_config(kind, folder, *SEARCHING, f"adaptive.search={strategy}"))
        recipe.setup()
    recipe.cleanup()
    return seconds


def measure(kind: str, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        seconds = max(run_on_ranks(RANKS, search, kind, run, name, timeout_s=600, in_group=False))
        result = search_results(run / "out")[""]
    return {
        "recipe": kind,
        "strategy": name,
        "measured": " ".join(str(probe["rows"]) for probe in result["probes"]),
        "trials": len(result["probes"]),
        "out of memory": sum(not probe["peak"]["fits"] for probe in result["probes"]),
        "seconds": round(seconds, 1),
        "answer": result["rows"],
    }


def run(pairs: int) -> Result:
    """Run each search once, because results do not vary."""
    rows = [measure("full", name) for name in SEARCHES]
    return Result(rows, "the demo's model on 2 ranks, 64 MiB per rank, 256 tokens a row, results not rounded")
