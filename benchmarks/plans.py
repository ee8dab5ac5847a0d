"""Run `tune-adaptive plan` for every config of this package except the demos, on 1, 8 and 64 ranks of three cards.

Each answer is saved at once, and the next run continues with the missing ones. To start over, delete the file. An
answer takes 10 to 40 CPU seconds.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from benchmarks.results import RESULTS, Result, Row, save
from torchtune_adaptive.config.registry import config_files, our_configs
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.rehearse.gpus import GPUS
from torchtune_adaptive.rehearse_recipe.request import PlanRequest, PlanSettings
from torchtune_adaptive.rehearse_recipe.start import rehearse_recipe

NAME = "plans"
RANKS, CARDS = (8, 1, 64), ("h100", "a100-40", "4090")
NOTE = (
    "rows of 4096 tokens and bytes of rank 0, from tune-adaptive plan; probes: rows of a probe, with a ! for each "
    "flush; seconds are CPU time of the rehearsal. "
    "imitated rows: the result of this command before it used rehearsals (2026-11-23, torch 2.13.0), if recorded"
)


def run(_: int) -> Result:
    path = RESULTS / f"{NAME}.json"
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {(row["config"], row["ranks"], row["card"]) for row in rows}
    for name, ranks, card in _questions():
        if (name, ranks, card) not in known:
            rows.append({"config": name, "ranks": ranks, "card": card, **_answer(name, ranks, card)})
            save(NAME, rows, NOTE)
            print(rows[-1], flush=True)
    return Result(rows, NOTE)


def _questions() -> Iterator[tuple[str, int, str]]:
    names = [config.name for config in our_configs() if "/demo/" not in config.name]
    return ((name, ranks, card) for ranks in RANKS for name in names for card in CARDS)


def _answer(name: str, ranks: int, card: str) -> dict[str, Any]:
    cfg = OmegaConf.load(config_files()[name])
    assert isinstance(cfg, DictConfig)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    try:
        found = rehearse_recipe(PlanRequest(cfg, PlanSettings(), name), (), GPUS[card], ranks)
    except AdaptiveError as error:
        return {"refused": str(error).splitlines()[0]}
    if not found.fits and found.out_of_memory is None:
        return {"refused": found.message or found.verdict()}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    searches = {each["stage"]: each["result"] for each in found.searches}
    stages = {stage: search.get("rows") for stage, search in searches.items()}
    probes = {
        stage: " ".join(f"{each['rows']}{'!' * each['peak']['retries']}" for each in search["probes"])
        for stage, search in searches.items()
    }
    names = "allocated_bytes", "reserved_bytes", "flushes"
    maxima = {name: max((step[name] for step in found.steps), default=0) for name in names}
    return {
        "rows": (stages if len(stages) > 1 else next(iter(stages.values()))) if found.fits else 0,
        **(maxima if found.fits else {"does not fit": found.verdict()}),
        "probes": probes,
        "seconds": round(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, 1),
        "wall": round(time.perf_counter() - began, 1),
    }
