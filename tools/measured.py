"""Generate the tables of measurements in README.md and docs/measured.md from benchmarks/results/.

python -m tools.measured         # `make bench` runs it too
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS
from torchtune_adaptive.atomic_files import read_json, replace_file
from torchtune_adaptive.formatting import count_of

ROOT = Path(__file__).parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "measured.md"
END = "<!-- end of measured -->"

Row = Mapping[str, Any]


def rows_of(name: str, folder: Path = RESULTS) -> list[Row]:
    rows: list[Row] = _content(name, folder)["rows"]
    return rows


def machine_of(name: str, folder: Path = RESULTS) -> Mapping[str, Any]:
    machine: Mapping[str, Any] = _content(name, folder)["machine"]
    return machine


def _content(name: str, folder: Path) -> Row:
    if (content := read_json(folder / f"{name}.json")) is None:
        raise ValueError("it does not exist")
    return content


@contextmanager
def naming(name: str, folder: Path) -> Iterator[None]:
    """Exit with an error that names this file of results if its content cannot be used."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SystemExit(
            f"error: {folder / name}.json is missing, damaged or of another version ({type(error).__name__}: {error}); "
            "no page was changed. Restore or delete the file, or measure again"
        ) from error


def span(values: Iterable[float], digits: int = 0) -> str:
    """Return "MIN to MAX", or one number if both round to the same."""
    found = list(values)
    least, most = f"{min(found):.{digits}f}", f"{max(found):.{digits}f}"
    return least if least == most else f"{least} to {most}"


def overhead(rows: list[Row]) -> tuple[str, str]:
    alike = [row for row in rows if row["stock"] == row["ours"]]
    cells = [f"{row['ratio']:.2f} ({_recipe(row)}, {_ranks(row['ranks'])})" for row in alike]
    spread = f"{min(row['lowest'] for row in alike):.2f} to {max(row['highest'] for row in alike):.2f}"
    what = "CPU time per step without errors, relative to torchtune's, same batch"
    return what, f"{', '.join(cells)}; medians, single pairs {spread}"


def trainer(rows: list[Row]) -> tuple[str, str]:
    cells = [
        f"{row['ratio']:.2f} ({row['placement']}{', accumulating' * (row['ranks'] > 1 and row['microbatches'] > 1)})"
        for row in rows
    ]
    spread = f"{min(row['lowest'] for row in rows):.2f} to {max(row['highest'] for row in rows):.2f}"
    what = "CPU time per step without errors, relative to transformers' Trainer, same batch"
    return what, f"{', '.join(cells)}; medians, single pairs {spread}"


def ddp(rows: list[Row]) -> tuple[str, str]:
    groups: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        groups.setdefault((row["ranks"], row["microbatches"]), []).append(row["ratio"])
    cells = [
        f"{span(ratios, 2)} ({ranks} ranks, {count_of(batches, 'batch', 'batches')} per step)"
        for (ranks, batches), ratios in groups.items()
    ]
    spread = f"{min(row['lowest'] for row in rows):.2f} to {max(row['highest'] for row in rows):.2f}"
    what = "CPU time per step of unsharded models with 30 or 600 trained tensors, relative to DistributedDataParallel"
    return what, f"{', '.join(cells)}; medians, single pairs {spread}"


def searches(rows: list[Row]) -> tuple[str, str]:
    ours, theirs = ([row for row in rows if row["search"] == name] for name in SEARCHES)
    slower = span((row["ratio"] for row in theirs), 1)
    return (
        f"finding the largest batch size, one process, {len(ours)} models",
        f"this package: {span(row['probes'] for row in ours)} probes, {_search(ours)} ({_rounded(ours)}); "
        f"accelerate: {slower} × as long, {_search(theirs)}",
    )


def recovery(rows: list[Row]) -> tuple[str, str]:
    *recovered, restarted = rows
    lost = span((row["lost steps"] for row in recovered), 1)
    after = span((row["step after"] for row in recovered), 2)
    restart = f"a restart of the run takes {restarted['lost s']:.0f} s, or {restarted['lost steps']:.0f} such steps"
    cells = [f"{lost} × the time of a step", f"until the microbatch grows back, steps take {after} × as long", restart]
    return "time of a recovery, 2 ranks, small model", "; ".join(cells)


def packing(rows: list[Row]) -> tuple[str, str]:
    most = max(row["ranks"] for row in rows)
    many, one = ([row for row in rows if row["ranks"] == ranks] for ranks in (most, 1))
    cells = [f"{row['ratio']:.1f} × on {row['lengths']}" for row in many]
    alone, packs = (
        ", ".join(f"{row[ratio]:.1f}" for row in shown) for ratio, shown in (("ratio", one), ("ratio to packs", many))
    )
    what = "target tokens per second of `token_budget: auto`, relative to a fixed number of rows in the same memory"
    masked = "(on a CPU, `packed: True` computes masked attention in full, so expect a different ratio on a GPU)"
    return (
        f"{what}, {_ranks(most)}",
        f"{', '.join(cells)} (1 rank: {alone}); relative to torchtune's `packed: True` {packs} × {masked}",
    )


def large_saves(rows: list[Row]) -> tuple[str, str]:
    stock, ours = rows
    cells = [f"{what} {ours[f'{key} s']:.1f} s ({stock[f'{key} s']:.1f} s)" for what, key in LARGE.items()]
    what = "pause for a checkpoint, and time until a resumed run can train (torchtune's in parentheses)"
    return f"{what}, {ours['GB']:.1f} GB, 2 ranks", ", ".join(cells)


def faults(rows: list[Row]) -> tuple[str, str]:
    injected, recovered, hung, wrong = (sum(row[key] for row in rows) for key in FAULTS)
    answer = f"{injected:,} injected, {recovered:,} recovered, {hung:,} hung, {wrong:,} wrong gradients"
    most = max(row["injected"] for row in rows)
    cases = f"{len(rows)} cases with up to {most} errors"
    return f"out-of-memory errors injected at single operations of a step (`make faults`), {cases}", answer


def nccl(rows: list[Row]) -> tuple[str, str]:
    what = (
        "the same over torch's NCCL process groups, on simulated GPUs ([`make test-nccl`](#nccl)), "
        f"{len({row['case'] for row in rows})} cases"
    )
    return what, _matched(rows)


def _matched(rows: list[Row]) -> str:
    injected, recovered, calls, *wrong = (sum(row[key] for row in rows) for key in ("injected", "recovered", *CALLS))
    mismatches, deadlocks = wrong
    return (
        f"{injected:,} injected, {recovered:,} recovered; {calls:,} calls of NCCL compared: {mismatches:,} mismatches, "
        f"{deadlocks:,} deadlocks"
    )


SEARCHES = ("linear", "accelerate")
"""The searches that the pages compare: this package's, and another."""
LARGE = {"pause": "pause", "resuming": "resume"}
FAULTS = ("injected", "recovered", "hung", "wrong gradient")
CALLS = ("calls", "mismatches", "deadlocks")
LINES = (faults, nccl, overhead, trainer, ddp, searches, recovery, large_saves, packing)
"""Each function is named after its file of results and returns the cells of a line."""


def measured_with(name: str, folder: Path) -> str:
    """Return the torch version and the date of a file of results."""
    machine = machine_of(name, folder)
    versions = sorted({row["torch"] for row in rows_of(name, folder) if "torch" in row})
    torch = f"{versions[0]} to {versions[-1]}" if versions else machine["torch"].partition("+")[0]
    return f"{torch} | {machine['date']}"


def table(folder: Path = RESULTS) -> str:
    shown = ["| measurement | result | torch | date |", "|---|---|---|---|"]
    for line in LINES:
        with naming(line.__name__, folder):
            what, result = line(rows_of(line.__name__, folder))
            shown.append(f"| {what} | {result} | {measured_with(line.__name__, folder)} |")
    return "\n".join(shown) + "\n"


def glance(folder: Path = RESULTS) -> str:
    """Return the table of README: the results that a new reader asks about."""
    _, injected = faults(rows_of("faults", folder))
    matched = _matched(rows_of("nccl", folder))
    *recoveries, restart = rows_of("recovery", folder)
    lost, after = (span((row[key] for row in recoveries), 1) for key in ("lost steps", "step after"))
    again = restart["lost steps"]
    alike = [row["ratio"] for row in rows_of("overhead", folder) if row["stock"] == row["ours"]]
    ours, theirs = ([row for row in rows_of("searches", folder) if row["search"] == name] for name in SEARCHES)
    probes, slower = span(row["probes"] for row in ours), span((row["ratio"] for row in theirs), 1)
    budgets = [f"{row['ratio']:.1f} × on {row['lengths']}" for row in rows_of("packing", folder) if row["ranks"] > 1]
    recovered = (
        f"{lost} × the time of a step (restarting the run takes {again:.0f} ×). Later steps, with the smaller "
        f"microbatch, take {after} × as long until it grows back"
    )
    lines = (
        ("faults", "out-of-memory errors, each injected before one operation of a step", injected),
        ("nccl", "the same with torch's NCCL process groups, on simulated GPUs", matched),
        ("recovery", "time of a recovery", recovered),
        ("overhead", "CPU time of a step without errors, relative to torchtune's", f"{span(alike, 2)} ×"),
        (
            "searches",
            "finding the largest batch size",
            f"{probes} probes, {_search(ours)} ({_rounded(ours)})",
        ),
        ("searches", "the same search by accelerate", f"{slower} × as long, {_search(theirs)}"),
        ("packing", "speed-up by `token_budget: auto`, compared with a fixed number of rows", ", ".join(budgets)),
    )
    versions = [measured_with(name, folder).partition(" | ")[0] for name, _, _ in lines]
    cores = machine_of("faults", folder)["cores"]
    head = f"| measured on {cores} CPU cores | [all measurements](docs/measured.md) | torch |\n|---|---|---|\n"
    rows = zip(lines, versions, strict=True)
    return head + "".join(f"| {what} | {result} | {version} |\n" for (_, what, result), version in rows)


def _outcomes(rows: list[Row]) -> str:
    found = [row for row in rows if "the GPU shows more" not in str(row.get("message"))]  # versions for the CPU
    passed, skipped = (sum(row["outcome"] == outcome for row in found) for outcome in ("passed", "skipped"))
    if passed + skipped == len(found):
        return ", ".join([f"{passed} of {len(found)} tests passed"] + [f"{skipped} skipped"] * bool(skipped))
    failed = [row["test"] for row in found if row["outcome"] not in ("passed", "skipped")]
    return f"{passed} of {len(found)} tests passed, {skipped} skipped; failed: {', '.join(failed)}"


def gpu_nccl(rows: list[Row]) -> str:
    return _outcomes(rows)


def gpu_recovery(rows: list[Row]) -> str:
    return _outcomes(rows)


def gpu_meshes(rows: list[Row]) -> str:
    return _outcomes(rows)


def gpu_unpadded(rows: list[Row]) -> str:
    return _outcomes(rows)


def gpu_recipes(rows: list[Row]) -> str:
    return _outcomes(rows)


def gpu_overhead(rows: list[Row]) -> str:
    return ", ".join(f"{row['ratio']:.2f} {row['step']} ({row['lowest']:.2f} to {row['highest']:.2f})" for row in rows)


def gpu_token_budgets(rows: list[Row]) -> str:
    cells = []
    for lengths in dict.fromkeys(row["lengths"] for row in rows):
        speed = {row["way"]: row["target tokens/s"] for row in rows if row["lengths"] == lengths}
        ours = [
            f"{speed['budget'] / speed[way]:.1f} × {way}" for way in ("rows", "packs") if {way, "budget"} <= {*speed}
        ]
        cells += [f"{lengths}: {', '.join(ours)}"] * bool(ours)
    return "; ".join(cells)


def gpu_searches(rows: list[Row]) -> str:
    found = [row for row in rows if row["search"] != "speed"]
    return ", ".join(
        f"{row['search']}: finds {row['rows']} of the {row['brute force']} rows that fit, {row['probes']} probes, "
        f"{row['flushes']} flushes, {row['seconds']:.0f} s"
        for row in found
    )


def gpu_fragmentation(rows: list[Row]) -> str:
    return "; ".join(
        f"{f'limit {share:.0%} of the peak' if (share := row['headroom']) else 'no limit'}: {row['flushes']} flushes, "
        f"{row['tokens/s']} tokens/s, {row['decisions'] or 'no decision'}"
        for row in rows
    )


GPU_PARTS = {
    gpu_nccl: "recovery over NCCL on 2 and 4 ranks, with real values; ranks share the GPU if there is only one",
    gpu_recovery: "recovery on 1, 2 and 3 ranks that share the GPU, and memory limits that the allocator enforces",
    gpu_meshes: "recovery under tensor parallelism and FSDP2, over gloo",
    gpu_overhead: "step time without errors, relative to torchtune's or Trainer's, same batch (median, range of pairs)",
    gpu_token_budgets: "target tokens per second of `token_budget: auto`, relative to fixed rows and torchtune's packs",
    gpu_unpadded: "gradients, memory and speed of unpadded samples, compared with padded ones",
    gpu_recipes: "losses of recipes with little memory, compiled or offloading, compared with unlimited and stock runs",
    gpu_searches: "search for the largest batch, 1.2 billion parameters, compared with trying every size",
    gpu_fragmentation: "60 steps of mixed lengths with little memory: flushes of the allocator's cache, limits, speed",
}
"""Measurements of `make gpu-day` about training; each function is named after its file of results."""


def on_a_gpu(folder: Path = RESULTS) -> str:
    """Return the table of a GPU's measurements, where they were made, and the parts without a result."""
    shown = ["| part | measurement | result |", "|---|---|---|"]
    missing = []
    places = defaultdict[str, list[str]](list)
    for part, what in GPU_PARTS.items():
        name = part.__name__.removeprefix("gpu_")
        with naming(part.__name__, folder):
            found = read_json(folder / f"{part.__name__}.json")
            result = part(found["rows"]) if found is not None and found["rows"] else ""
            if found is not None and result:
                result += "" if found["status"] == "done" else f" ({found['status']})"
                about = found["machine"]
                places[f"{about['gpu']}, torch {about['torch']}, {about['date']}"].append(name)
        if result:
            shown.append(f"| {name} | {what} | {result} |")
        else:
            missing.append(name)
    shown += [f"\n{place}: {', '.join(names)}" for place, names in places.items()]
    if missing:
        shown.append(f"\nNot measured yet: {', '.join(missing)}")
    return "\n".join(shown) + "\n"


def begin(name: str) -> str:
    return f"<!-- {name}: made by tools/measured.py -->\n"


TABLES = {
    "measured at a glance": glance,
    "measured": table,
    "measured on a GPU": on_a_gpu,
}


def renewed(text: str) -> str:
    """Return the page with regenerated tables."""
    for name, made in TABLES.items():
        if begin(name) in text:
            before, rest = text.split(begin(name))
            text = before + begin(name) + made() + END + rest.split(END, 1)[1]
    return text


def _recipe(row: Row) -> str:
    return "LoRA" if row["recipe"] == "lora" else str(row["recipe"])


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _search(rows: list[Row]) -> str:
    errors = span(row["out of memory"] for row in rows)
    named = "out-of-memory error" if errors == "1" else "out-of-memory errors"
    shares = span(100 * row["rows"] / row["fits"] for row in rows)
    return f"{errors} {named}, the size found is {shares} % of the largest one that fits"


def _rounded(rows: list[Row]) -> str:
    shares = span(100 * 2 ** (row["rows"].bit_length() - 1) / row["fits"] for row in rows)
    return f"{shares} % after the default rounding down to a power of two"


def main() -> None:
    # PAGE first: its tables name a file that cannot be used
    pages = {page: renewed(page.read_text(encoding="utf-8")) for page in (PAGE, README)}
    for page, text in pages.items():
        replace_file(page, text.encode())


if __name__ == "__main__":
    main()
