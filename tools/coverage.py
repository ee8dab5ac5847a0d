"""Predicts the batch size of every mirrored config for a few cards: docs/coverage.json and docs/coverage.md.

python tools/coverage.py [NAME ...]      # predicts these, by default all: about a minute of CPU time each
python tools/coverage.py --would-fit [NAME ...]   # what would let those fit the smallest card that do not: minutes each
python tools/coverage.py --table         # only writes the table anew

What would fit is looked for from where a run was ended that had not found it.
"""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path
from typing import Any

import torch
import torchtune
from omegaconf import DictConfig, OmegaConf
from torchtune.config._utils import _get_component_from_path

from torchtune_adaptive import AdaptiveError
from torchtune_adaptive.prediction import Budget, limit_bytes
from torchtune_adaptive.tune.plan.capacities import predict
from torchtune_adaptive.tune.plan.overrides import Overrides, changed, combinations, savers, starts
from torchtune_adaptive.tune.plan.question import PlanSettings
from torchtune_adaptive.tune.plan.settings import MANY_RANKS_OVERHEAD
from torchtune_adaptive.tune.start.command_line import locate

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "docs" / "coverage.json"
PAGE = ROOT / "docs" / "coverage.md"
RANKS, TOKENS = 8, 4096
CARDS = ("4090", "a100-40", "h100", "h200")
BEGIN, END = "<!-- coverage: made by tools/coverage.py -->\n", "<!-- end of coverage -->"
WOULD_FIT_BEGIN, WOULD_FIT_END = "<!-- would fit: made by tools/coverage.py -->\n", "<!-- end of would fit -->"
MORE_RANKS = (16, 32, 64)
FILES = ("output_dir", "tokenizer", "checkpointer", "metric_logger", "profiler")
TRIED = "tried so far"
"""Where the record has changes that do not help, of configs for which a run was ended before it knew what does."""
VERSIONS = {"torch": torch.__version__, "torchtune": torchtune.__version__}


def mirrored() -> list[str]:
    """The configs of the recipes that are predicted, which those of preference training are not."""
    mirror = runpy.run_path(str(ROOT / "tools" / "mirror_configs.py"))
    predicted = [names for recipe, names in mirror["MIRRORED"].items() if "finetune" in recipe]
    return [name for names in predicted for name in names]


def rows_by_card(name: str) -> dict[str, int]:
    """The batch size that is predicted to fit each card without allocator retries; 0 where none does."""
    cfg = OmegaConf.load(locate(f"adaptive/{name}"))
    assert isinstance(cfg, DictConfig)
    settings = PlanSettings(world_size=RANKS, memory_limit=CARDS[-1], sequence_length=(TOKENS,))
    answer = predict(cfg, settings, traced=lambda: None).capacities[0]
    overhead_bytes = limit_bytes(MANY_RANKS_OVERHEAD, "memory_overhead")
    return {card: answer.within(Budget(limit_bytes(card, "card"), overhead_bytes)).chosen_rows for card in CARDS}


def would_fit(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """The first change after which one row fits the smallest card, else the ranks on which it does as it is.

    Goes on behind what a run has tried that was ended before it was done.
    """
    cfg = OmegaConf.load(locate(f"adaptive/{name}"))
    assert isinstance(cfg, DictConfig)
    tried = record.setdefault(TRIED, {}).setdefault(name, [])
    for overrides, ranks in changes(cfg):
        change = " ".join([*overrides, f"on {ranks} ranks"])
        if change in tried:
            continue
        if rows := rows_with(changed(cfg, overrides), ranks):
            fewer = (f"batch_size={rows}",) if rows < cfg.batch_size else ()
            return {"append": " ".join([*overrides, *fewer]), "ranks": ranks, "rows": rows}
        tried.append(change)
        write_record(record)
        print(f"  does not fit: {change}", flush=True)
    return {"append": "", "ranks": None, "rows": 0}


def changes(cfg: DictConfig) -> list[tuple[Overrides, int]]:
    """What is tried, in this order: overrides on as many ranks as there are, then no overrides on more."""
    more_ranks: list[tuple[Overrides, int]] = [((), ranks) for ranks in MORE_RANKS]
    return [*((overrides, RANKS) for overrides in one_by_one(cfg)), *more_ranks]


def rows_with(cfg: DictConfig, ranks: int) -> int:
    if not starts(cfg):
        return 0
    settings = PlanSettings(world_size=ranks, memory_limit=CARDS[0], sequence_length=(TOKENS,))
    try:
        return predict(cfg, settings, traced=lambda: None, check=False, if_it_fits=True).capacities[0].chosen_rows
    except AdaptiveError as error:  # that not even one does, that it cannot be predicted, or leaves nothing for tensors
        print(f"  {error}", flush=True)
        return 0


def one_by_one(cfg: DictConfig) -> list[Overrides]:
    """Changes from the cheapest on; those that compile last, since to predict them takes longest."""
    single = savers(cfg, RANKS)
    return sorted([*single, *combinations(single)], key=lambda overrides: "compile=True" in overrides)


def that_do_not_fit(rows: dict[str, dict[str, int]]) -> list[str]:
    return [name for name in mirrored() if not rows[name][CARDS[0]]]


def read_record() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {"rows": {}, "would fit": {}}


def write_record(record: dict[str, Any]) -> None:
    record["versions"] = VERSIONS
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


def predict_rows(name: str, record: dict[str, Any]) -> None:
    record["rows"][name] = rows_by_card(name)
    write_record(record)


def predict_what_would_fit(name: str, record: dict[str, Any]) -> None:
    twin = next((other for other in record["would fit"] if what_is_trained(other) == what_is_trained(name)), name)
    if twin != name:  # of models that torchtune builds alike only the weights differ
        record["would fit"][name] = record["would fit"][twin]
    else:
        record["would fit"][name] = would_fit(name, record)
    record.get(TRIED, {}).pop(name, None)
    if not record.get(TRIED):
        record.pop(TRIED, None)
    write_record(record)


def what_is_trained(name: str) -> dict[str, Any]:
    """All of a config that a prediction goes by: the function that builds the model, and nothing about files."""
    cfg = OmegaConf.to_container(OmegaConf.load(locate(f"adaptive/{name}")))
    assert isinstance(cfg, dict)
    builder = _get_component_from_path(cfg["model"].pop("_component_"))
    return {"builder": builder, **{str(key): value for key, value in cfg.items() if key not in FILES}}


def table(rows: dict[str, dict[str, int]]) -> str:
    lines = [f"| config | {' | '.join(CARDS)} |", f"|---|{'---|' * len(CARDS)}"]
    for name in mirrored():
        cells = [str(rows[name][card] or "–") for card in CARDS]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def table_of_changes(record: dict[str, Any]) -> str:
    lines = [f"| config | append, to fit a {CARDS[0]} | ranks | rows |", "|---|---|---|---|"]
    for name in that_do_not_fit(record["rows"]):
        line = record["would fit"].get(name)
        cells = ["not predicted yet", "", ""] if line is None else _cells(line)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(line: dict[str, Any]) -> list[str]:
    if not line["rows"]:
        return ["nothing that was tried", "", ""]
    return [f"`{line['append']}`" if line["append"] else "as it is", str(line["ranks"]), str(line["rows"])]


def write_tables(record: dict[str, Any]) -> None:
    text = PAGE.read_text()
    for begin, end, made in (
        (BEGIN, END, table(record["rows"])),
        (WOULD_FIT_BEGIN, WOULD_FIT_END, table_of_changes(record)),
    ):
        before, rest = text.split(begin)
        text = before + begin + made + end + rest.split(end, 1)[1]
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--would-fit", action="store_true")
    options = parser.parse_args()
    record = read_record()
    if record.get("versions") != VERSIONS:
        record.pop(TRIED, None)
    kind, into, all_of_them = "rows", predict_rows, mirrored()
    if options.would_fit:
        kind, into, all_of_them = "would fit", predict_what_would_fit, that_do_not_fit(record["rows"])
    for name in [] if options.table else options.names or all_of_them:
        into(name, record)
        print(name, record[kind][name], flush=True)
    write_tables(record)


if __name__ == "__main__":
    main()
