"""What a search and a batch schedule tell people: tables and `batch_search.json` (plots.py: the picture)."""

import json
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torchtune_adaptive.accumulation import Accumulation
from torchtune_adaptive.peaks import Probe
from torchtune_adaptive.schedules import EpochPlan
from torchtune_adaptive.search import SearchResult
from torchtune_adaptive.sizes import format_bytes

SEARCH_FILE = "batch_search.json"

_TIMES = "\u00d7"


def search_table(result: SearchResult, sequence_length: int) -> str:
    """Every probe in the order it was measured, the choice marked, and how often memory ran out if it did."""
    budget = format_bytes(result.budget_bytes)
    lines = [
        f"batch search · {result.strategy} · {sequence_length} tokens · budget {budget} a rank",
        "  rows    peak       of budget   time",
        *(_probe_line(probe, result) for probe in result.probes),
    ]
    if result.out_of_memory_count:
        times = "once" if result.out_of_memory_count == 1 else f"{result.out_of_memory_count} times"
        lines.append(f"  out of memory {times} while probing, recovered")
    return "\n".join(lines)


def step_line(step: Accumulation, ranks: int) -> str:
    """The arithmetic of one optimizer step, and how it compares with the configured one."""
    even = step.rows * step.microbatches == step.samples_per_step
    rows = _count(step.rows, "row") if even else f"at most {_count(step.rows, 'row')}"
    if step.growth == 1:
        compared = "as configured"
    else:
        compared = f"configured: {round(step.samples_per_step / step.growth) * ranks}"
    microbatches = _count(step.microbatches, "microbatch", "microbatches")
    product = f" {_TIMES} ".join([rows, microbatches, _count(ranks, "rank")])
    return f"{product} {'=' if even else 'for'} {step.samples_per_step * ranks} samples a step ({compared})"


def schedule_table(plans: Sequence[EpochPlan], ranks: int) -> str:
    """The run before it starts; epochs in a row that are alike share a line."""
    lines = [
        f"batch schedule · {_count(len(plans), 'epoch')} · {sum(plan.steps for plan in plans)} steps",
        "  epoch    batch size   microbatches   samples a step   steps    learning rate",
    ]
    for _, alike in groupby(plans, key=lambda plan: {**vars(plan), "epoch": None}):
        group = list(alike)
        lines.append(_schedule_line(group[0], group[-1].epoch, ranks))
    return "\n".join(lines)


def write_search(directory: Path, result: SearchResult, sequence_length: int, fingerprint: Mapping[str, Any]) -> Path:
    """Writes `batch_search.json`, whole or not at all, for `read_search` and for people."""
    record = {
        "fingerprint": dict(fingerprint),
        "sequence_length": sequence_length,
        "result": result.to_json(),
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / SEARCH_FILE
    unfinished = path.with_suffix(".json.tmp")
    unfinished.write_text(json.dumps(record, indent=2) + "\n")
    os.replace(unfinished, path)
    return path


def read_search(directory: Path, fingerprint: Mapping[str, Any]) -> SearchResult | None:
    """The answer of an earlier search under the same fingerprint.

    None if there is none, or one of another fingerprint. Raises ValueError for a file that `write_search` did
    not write.
    """
    path = directory / SEARCH_FILE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text())
        # The fingerprint first: a file of another version may hold a result that this one cannot read.
        if record["fingerprint"] != json.loads(json.dumps(dict(fingerprint))):
            return None
        return SearchResult.from_json(record["result"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the record of a search ({error}); delete it to search again") from error


def _probe_line(probe: Probe, result: SearchResult) -> str:
    peak_bytes = probe.peak.peak_bytes
    if peak_bytes is None:
        peak, share = "out of memory".ljust(23), ""
    else:
        peak = format_bytes(peak_bytes).ljust(11)
        share = f"{100 * peak_bytes / result.budget_bytes:4.0f} %".ljust(12)
    seconds = f"{probe.peak.seconds:.1f} s".ljust(8)
    return f"  {probe.rows:<8}{peak}{share}{seconds}{_remark(probe, result)}".rstrip()


def _remark(probe: Probe, result: SearchResult) -> str:
    peak_bytes = probe.peak.peak_bytes
    remarks = []
    if probe.rows == result.rows:
        remarks.append(f"<- chosen ({result.reason})")
    if peak_bytes is not None and peak_bytes > result.budget_bytes:
        remarks.append("over budget")
    if probe.peak.retries:
        remarks.append(_count(probe.peak.retries, "allocator retry", "allocator retries"))
    return ", ".join(remarks)


def _schedule_line(plan: EpochPlan, last_epoch: int, ranks: int) -> str:
    epochs = f"{plan.epoch}" if plan.epoch == last_epoch else f"{plan.epoch}-{last_epoch}"
    microbatches = f"{plan.microbatches} {_TIMES} {plan.microbatch_rows}"
    samples = plan.samples_per_step * ranks
    rate = f"{_TIMES} {plan.lr_factor:.3g}"
    cells = f"  {epochs:<9}{plan.batch_size:<13}{microbatches:<15}{samples:<17}{plan.steps:<9}{rate}"
    if plan.refused_batch_size is None:
        return cells
    return f"{cells.ljust(76)}   <- {plan.refused_batch_size} asked for, does not fit"


def _count(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
