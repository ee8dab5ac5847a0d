"""The recipes' own searches on cards that are not there; writes benchmarks/results/null_searches_VERSION.json.

python -m tests.null.searches                    a config of each kind and size
python -m tests.null.searches --config all       every config of the package
python -m tests.null.searches --config 8B_full   only the configs whose names contain this
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from benchmarks.results import save
from torchtune_adaptive.config.command_line import locate
from torchtune_adaptive.config.registry import our_configs
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.forecast.measure import measure
from torchtune_adaptive.forecast.question import read_question

RANKS, TOKENS = 8, 2048
MEMORY_GB = (24, 40, 80)
ONE_OF_EACH = (
    "qwen2_5/0.5B_full",
    "llama3_2/1B_full",
    "llama3_2/1B_lora",
    "llama3_2/3B_full",
    "llama3_1/8B_full",
    "llama3_1/8B_lora",
    "llama3_1/8B_full_dpo",
    "llama3_1/8B_lora_dpo",
    "gemma2/9B_lora",
    "mistral/7B_ppo",
    "phi4/14B_lora",
    "llama3_1/70B_lora",
)


def names(asked: str) -> list[str]:
    every = [listed.name for listed in our_configs() if "/demo/" not in listed.name]
    if asked == "all":
        return every
    return [name for name in every if (asked in name if asked else name.removeprefix("adaptive/") in ONE_OF_EACH)]


def searches(name: str, memory_gb: int) -> Iterator[dict[str, Any]]:
    """What each stage's search measured."""
    cfg = OmegaConf.load(locate(name))
    assert isinstance(cfg, DictConfig)
    asked = OmegaConf.create({"world_size": RANKS, "memory_limit": f"{memory_gb}GB", "sequence_length": TOKENS})
    question = read_question(DictConfig(OmegaConf.merge(cfg, asked)), name, ())
    about = {"config": name, "memory_gb": memory_gb}
    try:
        found = measure(question)
    except AdaptiveError as error:
        yield {**about, "refused": str(error).splitlines()[0]}
        return
    if not found.searches:
        yield {**about, "refused": found.why_not}
    for stage, search in found.searches.items():
        probes = [(each["rows"], each["peak"]["retries"]) for each in search["probes"]]
        yield {
            **about,
            "stage": stage,
            "rows": search["rows"],
            "probes": probes,
            "flushes": sum(retries > 0 for rows, retries in probes),
        }


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--config", default="", help='"all", or a part of the names')
    rows: list[dict[str, Any]] = []
    note = f"rank 0 of {RANKS}, {TOKENS} tokens, rows rounded as the config says; probes: (rows, flushes)"
    for name in names(arguments.parse_args().config):
        for memory_gb in MEMORY_GB:
            for row in searches(name, memory_gb):
                rows.append(row)
                print(row, flush=True)
                save(f"null_searches_{torch.__version__.split('+')[0]}", rows, note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
