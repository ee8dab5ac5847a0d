"""Predicts the batch size of every mirrored config for a few cards: docs/coverage.json and docs/coverage.md.

python tools/coverage.py [NAME ...]      # predicts these, by default all: about a minute of CPU time each
python tools/coverage.py --table         # only writes the table anew
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

from torchtune_adaptive.prediction import Budget, limit_bytes
from torchtune_adaptive.tune.plan.answers import predict
from torchtune_adaptive.tune.plan.keys import PlanSettings
from torchtune_adaptive.tune.plan.settings import MANY_RANKS_OVERHEAD
from torchtune_adaptive.tune.start.configs import locate

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "docs" / "coverage.json"
PAGE = ROOT / "docs" / "coverage.md"
RANKS, TOKENS = 8, 4096
CARDS = ("4090", "a100-40", "h100", "h200")
BEGIN, END = "<!-- coverage: made by tools/coverage.py -->\n", "<!-- end of coverage -->"


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
    answer = predict(cfg, settings, traced=lambda: None).answers[0]
    overhead_bytes = limit_bytes(MANY_RANKS_OVERHEAD, "memory_overhead")
    return {card: answer.within(Budget(limit_bytes(card, "card"), overhead_bytes)).chosen_rows for card in CARDS}


def read_record() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {"rows": {}}


def table(rows: dict[str, dict[str, int]]) -> str:
    lines = [f"| config | {' | '.join(CARDS)} |", f"|---|{'---|' * len(CARDS)}"]
    for name in mirrored():
        cells = [str(rows[name][card] or "–") for card in CARDS]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_table(rows: dict[str, dict[str, int]]) -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(before + BEGIN + table(rows) + END + rest.split(END, 1)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    record = read_record()
    names = [] if options.table else options.names or mirrored()
    for name in names:
        record["rows"][name] = rows_by_card(name)
        record["versions"] = {"torch": torch.__version__, "torchtune": torchtune.__version__}
        RECORD.write_text(json.dumps(record, indent=2) + "\n")
        print(name, record["rows"][name], flush=True)
    write_table(record["rows"])


if __name__ == "__main__":
    main()
