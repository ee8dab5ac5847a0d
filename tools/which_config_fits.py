"""Rehearses torchtune's configs on four GPUs and writes docs/which-config-fits.md.

A config takes about 30 CPU seconds for each GPU. Results are kept, so the command can be stopped and continued.

python -m tools.which_config_fits          # rehearses what is missing
python -m tools.which_config_fits --page   # only writes the page
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_rehearsal import rehearse
from gpu_rehearsal.gpus import GPUS
from gpu_rehearsal.sweep import SweepRow

from benchmarks.results import RESULTS, save
from torchtune_adaptive.config import registry
from torchtune_adaptive.config.command_line import read_config
from torchtune_adaptive.config.registry import NamedConfig, stock_configs
from torchtune_adaptive.rehearsing import length_of

PAGE = Path(__file__).parent.parent / "docs" / "which-config-fits.md"
NAME = "which_config_fits"
CARDS = ("4090", "a100-40", "a100", "h100")
SAME_MEMORY = {"a100": "h100"}
"""GPUs of the same memory: one is rehearsed, and the time of the other follows from the same work."""
RECIPES = {stock: recipe for recipe, stock in registry.RECIPES.items() if recipe != registry.PPO}
NOTE = "the largest microbatch that a search finds, and the tokens per second of all ranks: tools/which_config_fits.py"
FAMILIES = ("llama3_1/", "llama3_2/", "llama3_3/", "mistral/", "phi4/", "qwen2_5/")
"""The page shows these models; the results contain all."""
TEXT = """# Which config fits on which GPU

This table predicts how large a microbatch of each torchtune config can be. It was made without a GPU. For example, the
cell `8 (22,582)` means that a microbatch of 8 rows fits, and that all ranks together train 22,582 tokens per second.

The search of [`--without-data`](rehearsing-recipes.md) found the largest microbatch, rounded down to a power of two, on
the number of ranks that the comments of the config state. All rows have {length} tokens, unless the config is marked.
Tokens per second are [estimated](../rehearsal/docs/time.md); *no* means that not even one row fits. CUDA and NCCL are
assumed to need 3 GiB of each GPU. An `a100` fits as many rows as an `h100`, and is about half as fast. In DPO, a row is
a pair. The policy and the reference model have separate microbatches, and the table shows the smaller one. Configs with
the same model differ in more than its size: `qwen2_5/72B_lora` checkpoints activations, `qwen2_5/32B_lora` does not.

`python -m tools.which_config_fits` makes this page from [the results](../benchmarks/results/{name}.json) of {date}.
They also contain Llama 2 and 3, Gemma, Phi 3 and Qwen 2. If you delete them, the command repeats the rehearsals, which
take {cpu_s:,.0f} CPU seconds. Configs with images were not rehearsed.
"""
LENGTH = 4096
SHOWN = ("4090", "a100-40", "h100")


def cpu_s() -> float:
    """Return the CPU seconds of all rehearsals that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def stored() -> list[dict[str, Any]]:
    file = RESULTS / f"{NAME}.json"
    return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []


def ranks_of(config: NamedConfig) -> int:
    """Return the number of ranks that the comments of a config state."""
    text = config.path.read_text(encoding="utf-8")
    nodes = re.search(r"--nnodes (\d+)|on (\d+) nodes", text)
    per_node = re.search(r"--nproc_per_node (\d+)|nodes w/ (\d+) devices", text)
    return int((nodes[1] or nodes[2]) if nodes else 1) * int((per_node[1] or per_node[2]) if per_node else 1)


def rehearsed(config: NamedConfig, done: Mapping[str, Any]) -> dict[str, Any]:
    """Rehearse a config on all GPUs, without those that are done."""
    row: dict[str, Any] = {"recipe": config.recipe, "config": config.name, "ranks": ranks_of(config), **done}
    row.setdefault("gpus", {})
    cfg = read_config(config.path, [])
    row["tokens"] = length_of(cfg)
    if "vision" in config.name:
        return row | {"refused": "--without-data has no images"}
    recipe = RECIPES[config.recipe]
    command = ["-m", recipe, "--config", str(config.path), "use_maximum_batch_size=True", "device=cuda"]
    for card in (name for name in CARDS if name not in SAME_MEMORY and name not in row["gpus"]):
        begin_s = cpu_s()
        found = rehearse(command, card, row["ranks"], steps=2, without_data=True, quiet=True)
        spent_s = cpu_s() - begin_s
        for name in (card, *(name for name, same in SAME_MEMORY.items() if same == card)):
            of_card = SweepRow(GPUS[name], replace(found, gpu=GPUS[name]))
            answer = {key: value for key, value in of_card.as_dict().items() if key not in ("gpu", "ranks", "searches")}
            row["gpus"][name] = answer | {"rows": found.most_rows, "cpu_s": spent_s if name == card else 0}
    return row


def cell(answer: Mapping[str, Any] | None) -> str:
    if answer is None:
        return ""
    if not answer["fits"]:
        return "no" if answer["fits"] is False else "no answer"
    rate = answer["tokens_per_second"]
    return f"{answer['rows']} ({rate:,.0f})" if rate else str(answer["rows"])


def page(rows: Iterable[Mapping[str, Any]]) -> str:
    rows = [row for row in rows if "refused" not in row]
    about = json.loads((RESULTS / f"{NAME}.json").read_text(encoding="utf-8"))["machine"]
    spent = [answer["cpu_s"] for row in rows for answer in row["gpus"].values() if answer["cpu_s"]]
    lines = [TEXT.format(name=NAME, date=about["date"], cpu_s=sum(spent), length=LENGTH)]
    lines += [f"| config | ranks | {' | '.join(SHOWN)} |", "|---" * (2 + len(SHOWN)) + "|"]
    of_cells: dict[str, list[str]] = {}
    for row in (row for recipe in RECIPES for row in rows if row["recipe"] == recipe):
        if row["config"].startswith(FAMILIES):
            name = row["config"] + f" ({row['tokens']} tokens)" * (row["tokens"] != LENGTH)
            cells = [row["ranks"], *(cell(row["gpus"].get(name)) for name in SHOWN)]
            of_cells.setdefault(" | ".join(map(str, cells)), []).append(name)
    lines += [*(f"| {', '.join(names)} | {cells} |" for cells, names in of_cells.items()), ""]
    return "\n".join(lines)


def main() -> None:
    rows = {(row["recipe"], row["config"]): row for row in stored()}
    for config in [each for each in stock_configs() if each.recipe in RECIPES and "--page" not in sys.argv]:
        key = config.recipe, config.name
        begin_s = time.monotonic()
        rows[key] = rehearsed(config, rows.get(key, {}))
        save(NAME, list(rows.values()), NOTE)
        print(f"{config.recipe} {config.name}: {time.monotonic() - begin_s:.0f} s", flush=True)
    PAGE.write_text(page(rows.values()), encoding="utf-8")


if __name__ == "__main__":
    main()
