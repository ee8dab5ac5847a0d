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
from gpu_rehearsal.ci.cases import read_cases
from gpu_rehearsal.gpus import GPUS
from gpu_rehearsal.settings import overhead_of
from gpu_rehearsal.sweep import SweepRow

from benchmarks.results import RESULTS, save
from torchtune_adaptive.config.command_line import read_config
from torchtune_adaptive.config.registry import FULL, FULL_DPO, LORA, LORA_DPO, NamedConfig, stock_configs
from torchtune_adaptive.formatting import count_of
from torchtune_adaptive.rehearsing import length_of

PAGE = Path(__file__).parent.parent / "docs" / "which-config-fits.md"
NAME = "which_config_fits"
CARDS = ("4090", "a100-40", "a100", "h100")
SAME_MEMORY = {"a100": "h100"}
"""GPUs of the same memory: one is rehearsed, and the time of the other follows from the same work."""
RECIPES = {recipe.stock_name: recipe for recipe in (FULL, LORA, FULL_DPO, LORA_DPO)}
KINDS = {name: name.removesuffix("_distributed").replace("_", " ") for name in RECIPES}
NOTE = "the largest microbatch that a search finds, and the tokens per second of all ranks: tools/which_config_fits.py"
TEXT = """# Which config fits on which GPU

This page has predictions of [rehearsals](rehearsing.md), made without a GPU: how large a microbatch of each torchtune
config can be, and whether example scripts of TRL, transformers and torchtitan fit. For example, the cell `8 rows,
10,946` means that a microbatch of 8 rows fits, and that all ranks together train 10,946 tokens per second.

For each config, the search of [`--without-data`](rehearsing-recipes.md) found the largest microbatch, rounded down to a
power of two, on the number of ranks that the comments of the config state. All rows have the stated number of tokens.
Tokens per second are [estimated](rehearsing.md#time); *no* means that not even one row fits. CUDA and NCCL are assumed
to need 3 GiB of each GPU. `batch_size` is the config's own number of rows, which are usually shorter. In DPO, a row is
a pair. The policy and the reference model have separate microbatches, and the table shows the smaller one.

`python -m tools.which_config_fits` makes this page from [the results](../benchmarks/results/{name}.json) of {date}.
If you delete them, it repeats the rehearsals, which take {cpu_s:,.0f} CPU seconds.
"""


EXAMPLES = RESULTS.parent / "examples"
"""The folder of files of cases for other projects, each with a text."""
LARGER, SMALLER = "h100", "4090"
"""The GPU of most cases, which their names omit, and one of which the page says whether the same peaks fit."""
OPTION = re.compile(
    r"--(?:model_name|teacher_model|reward_model|per_device_train|max_\w*length|use_peft|load_in|packing)"
    r"\S*(?: (?!--)\S+)?"
)
"""The options of a command that the page shows."""


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
    row["batch_size"], row["tokens"] = int(cfg.batch_size), length_of(cfg)
    if "vision" in config.name:
        return row | {"refused": "--without-data has no images"}
    recipe = RECIPES[config.recipe].name
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
    rows = count_of(answer["rows"], "row")
    return f"{rows}, {rate:,.0f}" if rate else rows


def page(rows: Iterable[Mapping[str, Any]]) -> str:
    rows = list(rows)
    about = json.loads((RESULTS / f"{NAME}.json").read_text(encoding="utf-8"))["machine"]
    spent = [answer["cpu_s"] for row in rows for answer in row["gpus"].values() if answer["cpu_s"]]
    configs = [each for each in stock_configs() if each.recipe in RECIPES]
    known = {(row["recipe"], row["config"]) for row in rows}
    missing = [each for each in configs if (each.recipe, each.name) not in known]
    lines = [TEXT.format(name=NAME, date=about["date"], cpu_s=sum(spent)).rstrip()]
    for recipe, kind in KINDS.items():
        shown = [row for row in rows if row["recipe"] == recipe and "refused" not in row]
        if not shown:
            continue
        lines += ["", f"## {kind.capitalize().replace('dpo', 'DPO').replace('Lora', 'LoRA')}", ""]
        lines += [f"| config | ranks | tokens | batch_size | {' | '.join(CARDS)} |", "|---" * (4 + len(CARDS)) + "|"]
        of_cells: dict[str, list[str]] = {}
        for row in shown:
            cells = [row["ranks"], row["tokens"], row["batch_size"], *(cell(row["gpus"].get(name)) for name in CARDS)]
            of_cells.setdefault(" | ".join(map(str, cells)), []).append(row["config"])
        lines += [f"| {', '.join(names)} | {cells} |" for cells, names in of_cells.items()]
    refused: dict[str, list[str]] = {}
    for row in rows:
        if "refused" in row:
            refused.setdefault(row["refused"], []).append(row["config"])
    lines += ["", "## What was not rehearsed", ""]
    lines += [f"- {', '.join(names)}: {why}" for why, names in refused.items()]
    unanswered = [(row, name, each) for row in rows for name, each in row["gpus"].items() if each["fits"] is None]
    lines += [
        f"- {row['config']} ({KINDS[row['recipe']]}) on {name}: {each['verdict']}" for row, name, each in unanswered
    ]
    lines += [f"- {each.name} ({KINDS[each.recipe]}): not yet" for each in missing]
    for name in "trl", "transformers", "torchtitan":
        lines += examples(EXAMPLES / f"{name}.toml")
    return "\n".join(lines) + "\n"


def fits_smaller(row: Mapping[str, Any]) -> str:
    """Return whether the peaks of a row fit on the smaller GPU, where the allocator may have to flush its cache."""
    usable = GPUS[SMALLER].memory - overhead_of(row["ranks"])
    return "yes" if row["reserved_bytes"] <= usable else "no" if row["allocated_bytes"] > usable else "unknown"


def examples(file: Path) -> list[str]:
    """Return the section of a file of cases, from the output of benchmarks/examples/rehearse.sh."""
    commands = {case.name: case.options["command"] for case in read_cases(file)}
    rows = json.loads((RESULTS / f"examples_{file.stem}.json").read_text(encoding="utf-8"))
    text, _, missing = file.with_suffix(".md").read_text(encoding="utf-8").partition("\n---\n")
    lines = ["", text.format(cpu_s=sum(row["cpu_s"] for row in rows), count=len(rows)).strip(), ""]
    lines += [
        "| case | options | allocated | reserved | tokens/s | fits on 4090 |",
        "|---" * 6 + "|",
    ]
    for row in (row for row in rows if row["fits"] is not None and "debug" not in row["case"]):
        allocated, reserved = (f"{row[f'{each}_bytes'] / 2**30:.2f} GiB" for each in ("allocated", "reserved"))
        rate = f"{row['tokens_per_second']:,.0f}" if row["fits"] else "does not fit"
        options = " ".join(OPTION.findall(commands[row["case"]])).replace("--model_name_or_path ", "").replace("--", "")
        cells = [row["case"].removesuffix(f", {LARGER}"), options, allocated, reserved, rate, fits_smaller(row)]
        lines.append(f"| {' | '.join(cells)} |")
    failed = [
        f"- {row['case'].rpartition(', ')[0]}: {re.sub(r' at [^ ]+:[0-9]+', '', row['verdict'])}"
        for row in rows
        if row["fits"] is None
    ]
    later = [name.rpartition(", ")[0] for name in commands.keys() - {row["case"] for row in rows}]
    return [*lines, "", missing.strip(), *failed, *[f"- not yet: {'; '.join(sorted(later))}"] * bool(later)]


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
