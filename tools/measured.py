"""Writes the table of what was measured into README.md, from benchmarks/results/.

python -m tools.measured         # after `make bench`, which does it, too
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.advice import kendalls_tau
from benchmarks.results import RESULTS

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- measured: made by tools/measured.py -->\n", "<!-- end of measured -->"

Row = Mapping[str, Any]


def rows_of(name: str, folder: Path = RESULTS) -> list[Row]:
    rows: list[Row] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def span(values: Iterable[float], digits: int = 0) -> str:
    """From the least to the most, in words, and once where both read alike."""
    found = list(values)
    least, most = f"{min(found):.{digits}f}", f"{max(found):.{digits}f}"
    return least if least == most else f"{least} to {most}"


def overhead(rows: list[Row]) -> tuple[str, str]:
    alike = [row for row in rows if row["stock"] == row["ours"]]
    cells = [f"{row['ratio']:.2f} {_recipe(row)} on {_ranks(row['ranks'])}" for row in alike]
    spread = f"{min(row['lowest'] for row in alike):.2f} to {max(row['highest'] for row in alike):.2f}"
    what = "CPU time of a step ÷ torchtune's, at the same batch, while nothing fails"
    return what, f"{', '.join(cells)} (medians; single pairs {spread})"


def searches(rows: list[Row]) -> tuple[str, str]:
    ours, *others = ([row for row in rows if row["search"].startswith(name)] for name in SEARCHES)
    rounded = span(100 * 2 ** (row["rows"].bit_length() - 1) / row["fits"] for row in ours)
    probes, once_rounded = span(row["probes"] for row in ours), f"({rounded} % once rounded to a power of two)"
    cells = [f"ours {probes} probes, {_search(ours)} {once_rounded}"]
    for name, theirs in zip(SEARCHES[1:], others, strict=True):
        cells.append(
            f"{name.replace(',', '')} {span((row['ratio'] for row in theirs), 1)} × the time, {_search(theirs)}"
        )
    return f"finding a size, one process, {len(ours)} models", "; ".join(cells)


def recovery(rows: list[Row]) -> tuple[str, str]:
    *recovered, restarted = rows
    lost = span((row["lost steps"] for row in recovered), 1)
    after = span((row["step after"] for row in recovered), 2)
    restart = f"a restart takes {restarted['lost s']:.0f} s, {restarted['lost steps']:.0f} steps of this small model"
    cells = [f"{lost} step times lost", f"later steps take {after} × as long until the size grows back", restart]
    return "a step that runs out of memory, 2 ranks", "; ".join(cells)


def packing(rows: list[Row]) -> tuple[str, str]:
    most = max(row["ranks"] for row in rows)
    many, one = ([row for row in rows if row["ranks"] == ranks] for ranks in (most, 1))
    cells = [f"{row['ratio']:.1f} × on {row['lengths']}" for row in many]
    alone, packs = (
        ", ".join(f"{row[ratio]:.1f}" for row in shown) for ratio, shown in (("ratio", one), ("ratio to packs", many))
    )
    what = f"`token_budget: auto` over batches of rows, same memory, {_ranks(most)}: target tokens a second"
    masked = "which have a masked attention on a CPU: expect another ratio on a GPU"
    return what, f"{', '.join(cells)} (1 rank: {alone}); over torchtune's `packed: True` {packs} ×, {masked}"


def dealing(rows: list[Row]) -> tuple[str, str]:
    ranks = sorted({row["ranks"] for row in rows})
    dealt, stayed = (span((row[key] for row in rows), 2) for key in ("dealt", "stayed"))
    what = f"step time ÷ that of a perfectly balanced step, on {ranks[0]} to {ranks[-1]} ranks, simulated"
    return what, f"{dealt} with samples dealt to the ranks, {stayed} without"


def saves(rows: list[Row]) -> tuple[str, str]:
    cells = [f"{row['checkpoint']} {row['ours s']:.2f} ({row['stock s']:.2f})" for row in rows]
    size = span(row["MiB"] for row in rows)
    return f"seconds that training stands still for a save (stock's), 2 ranks, {size} MiB", ", ".join(cells)


def stages(rows: list[Row]) -> tuple[str, str]:
    return "DPO, one limit for both stages: CPU time ÷ that with a limit each, 2 ranks", _over(rows)


def rollouts(rows: list[Row]) -> tuple[str, str]:
    return "PPO, one limit for all seven stages: CPU time ÷ that with a limit each, 2 ranks", _over(rows)


def _over(rows: list[Row]) -> str:
    return ", ".join(f"{row['ratio by CPU time']:.2f} ({row['shape']})" for row in rows)


def prediction(rows: list[Row]) -> tuple[str, str]:
    configs = {row["config"].split(",")[0] for row in rows}
    most = max(abs(row["difference bytes"]) for row in rows)
    what = f"predicted peak beside the measured one, on CPUs, 2 ranks ({', '.join(sorted(configs))})"
    off = f"off by at most {most} bytes" if most else "exact"
    return what, f"{off} in all {len(rows)} cases, {span(row['measured MiB'] for row in rows)} MiB"


def advice(rows: list[Row]) -> tuple[str, str]:
    tau = kendalls_tau([(row["predicted"], row["measured"]) for row in rows])
    above = span(100 * (row["predicted"] / row["measured"] - 1) for row in rows)
    what = f"order of {len(rows)} settings by speed, predicted and measured"
    return what, f"Kendall's τ {tau:.2f}; the order only: tokens a second are predicted {above} % too high there"


def faults(rows: list[Row]) -> tuple[str, str]:
    injected, recovered, hung, wrong = (sum(row[key] for row in rows) for key in FAULTS)
    answer = f"{injected:,} injected, {recovered:,} recovered, {hung:,} hung, {wrong:,} wrong gradients"
    most = max(row["injected"] for row in rows)
    cases = f"{len(rows)} cases: how it is trained, which ranks fail, when; at most {most:,} in each, evenly spread"
    return f"operations of a step as the point of failure (`make faults`), {cases}", answer


SEARCHES = ("linear", "accelerate", "Lightning, power", "Lightning, binsearch")
"""Ours, then those of others, by how their names begin."""
FAULTS = ("injected", "recovered", "hung", "wrong gradient")
LINES = (overhead, searches, recovery, saves, packing, dealing, stages, rollouts, prediction, advice, faults)
"""Each is the name of a file, and what is said of its rows."""


def table(folder: Path = RESULTS) -> str:
    lines = [line(rows_of(line.__name__, folder)) for line in LINES]
    return "\n".join(["| what | result |", "|---|---|", *(f"| {what} | {result} |" for what, result in lines)]) + "\n"


def renewed(text: str) -> str:
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END, 1)[1]


def _recipe(row: Row) -> str:
    return {"lora": "LoRA"}.get(row["recipe"], row["recipe"])


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _search(rows: list[Row]) -> str:
    errors = span(row["out of memory"] for row in rows)
    named = "out-of-memory error" if errors == "1" else "out-of-memory errors"
    return f"{errors} {named}, {span(100 * row['rows'] / row['fits'] for row in rows)} % of what fits"


def main() -> None:
    README.write_text(renewed(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
