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
    what = "CPU time of a step over stock's, at the same batch, while nothing fails"
    return what, f"{', '.join(cells)} (medians; single pairs {spread})"


def searches(rows: list[Row]) -> tuple[str, str]:
    ours, *others = ([row for row in rows if row["search"].startswith(name)] for name in SEARCHES)
    cells = [f"ours {span(row['probes'] for row in ours)} probes, {_search(ours)}"]
    for name, theirs in zip(SEARCHES[1:], others, strict=True):
        cells.append(f"{name} {span((row['ratio'] for row in theirs), 1)} × the time, {_search(theirs)}")
    return f"finding a size, one process, {len(ours)} models", "; ".join(cells)


def recovery(rows: list[Row]) -> tuple[str, str]:
    *recovered, restarted = rows
    lost = span((row["lost steps"] for row in recovered), 1)
    restart = f"a restart from a checkpoint loses {restarted['lost steps']:.0f}, and the steps since"
    return "a step that runs out of memory, 2 ranks", f"{lost} step times lost; {restart}"


def packing(rows: list[Row]) -> tuple[str, str]:
    most = max(row["ranks"] for row in rows)
    shown = [row for row in rows if row["ranks"] == most]
    cells = [f"{row['ratio']:.1f} × on {row['lengths']}" for row in shown]
    packs = ", ".join(f"{row['ratio to packs']:.1f}" for row in shown)
    what = f"`token_budget: auto` over batches of rows, same memory, {_ranks(most)}: target tokens a second"
    return what, f"{', '.join(cells)}; over torchtune's `packed: True` {packs} ×"


def dealing(rows: list[Row]) -> tuple[str, str]:
    ranks = sorted({row["ranks"] for row in rows})
    dealt, stayed = (span((row[key] for row in rows), 2) for key in ("dealt", "stayed"))
    what = f"a step over its useful work, on {ranks[0]} to {ranks[-1]} ranks, simulated"
    return what, f"{dealt} with samples dealt to the ranks, {stayed} without"


def saves(rows: list[Row]) -> tuple[str, str]:
    cells = [f"{row['checkpoint']} {row['ours s']:.2f} ({row['stock s']:.2f})" for row in rows]
    size = span(row["MiB"] for row in rows)
    return f"seconds that training stands still for a save (stock's), 2 ranks, {size} MiB", ", ".join(cells)


def stages(rows: list[Row]) -> tuple[str, str]:
    return "DPO with one number of pairs for both stages, CPU time over one for each, 2 ranks", _over(rows)


def rollouts(rows: list[Row]) -> tuple[str, str]:
    return "PPO with one number of rows for all seven stages, CPU time over one for each, 2 ranks", _over(rows)


def _over(rows: list[Row]) -> str:
    return ", ".join(f"{row['ratio by CPU time']:.2f} ({row['shape']})" for row in rows)


def prediction(rows: list[Row]) -> tuple[str, str]:
    configs = {row["config"].split(",")[0] for row in rows}
    most = max(abs(row["difference bytes"]) for row in rows)
    what = f"predicted peak beside the measured one, on CPUs, 2 ranks ({', '.join(sorted(configs))})"
    return what, f"off by at most {most} bytes of {span(row['measured MiB'] for row in rows)} MiB"


def advice(rows: list[Row]) -> tuple[str, str]:
    tau = kendalls_tau([(row["predicted"], row["measured"]) for row in rows])
    return f"order of {len(rows)} settings by speed, predicted and measured", f"Kendall's τ {tau:.2f}"


def faults(rows: list[Row]) -> tuple[str, str]:
    injected, recovered, hung, wrong = (sum(row[key] for row in rows) for key in FAULTS)
    answer = f"{injected:,} injected, {recovered:,} recovered, {hung:,} hung, {wrong:,} wrong gradients"
    cases = f"{len(rows)} cases: how it is trained, which ranks fail, when"
    return f"operations of a step as the point of failure (`make faults`), {cases}", answer


SEARCHES = ("linear", "accelerate", "Lightning")
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
    return f"{errors} out-of-memory errors, {span(100 * row['rows'] / row['fits'] for row in rows)} % of what fits"


def main() -> None:
    README.write_text(renewed(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
