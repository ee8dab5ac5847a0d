"""What a search and a batch schedule tell people: tables and `batch_search.json` (charts/searches.py: the picture)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from torchtune_adaptive.memory.peak import Peak
from torchtune_adaptive.record.events import SEARCH, Event
from torchtune_adaptive.record.files import keep_file, read_json
from torchtune_adaptive.schedules.accumulation import Accumulation
from torchtune_adaptive.schedules.growth import EpochPlan
from torchtune_adaptive.search.lengths import Profile
from torchtune_adaptive.search.peaks import Probe
from torchtune_adaptive.search.rows import SearchResult
from torchtune_adaptive.sizes import format_bytes

SEARCH_FILE = "batch_search.json"

Answer = TypeVar("Answer", SearchResult, Profile)

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


def profile_table(result: Profile) -> str:
    """Every probe of a profile in the order it was measured, what was fitted to them, and how far that is off."""
    lines = [
        f"token budget · {_count(len(result.points), 'probe')} · budget {format_bytes(result.budget_bytes)} a rank",
        "  rows    length   tokens    peak       of budget   time",
        *(_point_line(point, result) for point in result.points),
        f"  fitted over rows and length, off by {100 * result.held_out_error:.1f} % at most where not fitted to; "
        f"any length fits up to {result.constant_tokens} tokens",
    ]
    return "\n".join(lines)


def search_event(result: SearchResult, sequence_length: int) -> Event:
    """The answer, for the record of the run."""
    peak_bytes = next(probe.peak.peak_bytes for probe in result.probes if probe.rows == result.rows)
    reason = f"batch search: {_count(result.rows, 'row')} of {sequence_length} tokens ({result.reason})"
    return Event(
        kind=SEARCH,
        step=0,
        reason=reason,
        unit="rows",
        after=result.rows,
        peak_bytes=peak_bytes,
        budget_bytes=result.budget_bytes,
    )


def profile_event(result: Profile) -> Event:
    """Likewise."""
    reason = f"token budget: any length fits up to {result.constant_tokens} tokens, or as many as the surfaces say"
    limit_bytes, budget_bytes = result.limit_bytes, result.budget_bytes
    return Event(kind=SEARCH, step=0, reason=reason, unit="bytes", after=limit_bytes, budget_bytes=budget_bytes)


def from_earlier_run(event: Event) -> Event:
    """A search whose answer was taken from its record."""
    return replace(event, reason=f"{event.reason}, as found before")


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


def schedule_table(plans: Sequence[EpochPlan], ranks: int, *, by_tokens: bool = False) -> str:
    """The run before it starts; epochs in a row that are alike share a line."""
    lines = [
        f"batch schedule · {_count(len(plans), 'epoch')} · {sum(plan.steps for plan in plans)} steps",
        "  epoch    batch size   microbatches   samples a step   steps    learning rate",
    ]
    for _, alike in groupby(plans, key=lambda plan: {**vars(plan), "epoch": None}):
        group = list(alike)
        lines.append(_schedule_line(group[0], group[-1].epoch, ranks, by_tokens))
    return "\n".join(lines)


def write_search(
    directory: Path, result: SearchResult | Profile, sequence_length: int, fingerprint: Mapping[str, Any]
) -> None:
    """Writes `batch_search.json`, for `read_search` and for people; a line says so where that is not possible."""
    record = {
        "fingerprint": dict(fingerprint),
        "sequence_length": sequence_length,
        "result": result.to_json(),
    }
    content = (json.dumps(record, indent=2) + "\n").encode()
    keep_file(directory / SEARCH_FILE, content, "the next run will search again")


def read_search(directory: Path, fingerprint: Mapping[str, Any], kind: type[Answer]) -> Answer | None:
    """The answer of an earlier search under the same fingerprint.

    None if there is none, or one of another fingerprint. Raises ValueError for a file that cannot be read, or that
    `write_search` did not write.
    """
    path = directory / SEARCH_FILE
    try:
        record = read_json(path)
        # The fingerprint first: a file of another version may hold a result that this one cannot read.
        if record is None or record["fingerprint"] != json.loads(json.dumps(dict(fingerprint))):
            return None
        return kind.from_json(record["result"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the record of a search ({error}); delete it to search again") from error


def _point_line(point: Probe, result: Profile) -> str:
    size = f"  {point.rows:<8}{point.length:<9}{point.rows * point.length:<10}"
    remarks = ["held out"] if point.held_out else []
    if not point.accepted(result.budget_bytes):
        remarks.append("does not fit")
    return f"{size}{_need(point.peak, result.budget_bytes)}{', '.join(remarks)}".rstrip()


def _probe_line(probe: Probe, result: SearchResult) -> str:
    return f"  {probe.rows:<8}{_need(probe.peak, result.budget_bytes)}{_remark(probe, result)}".rstrip()


def _need(measured: Peak, budget_bytes: int) -> str:
    """Columns: peak, its share of the budget, time."""
    peak_bytes = measured.peak_bytes
    if peak_bytes is None:
        peak, share = "out of memory".ljust(23), ""
    else:
        peak = format_bytes(peak_bytes).ljust(11)
        share = f"{100 * peak_bytes / budget_bytes:4.0f} %".ljust(12)
    return f"{peak}{share}{f'{measured.seconds:.1f} s'.ljust(8)}"


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


def _schedule_line(plan: EpochPlan, last_epoch: int, ranks: int, by_tokens: bool) -> str:
    epochs = f"{plan.epoch}" if plan.epoch == last_epoch else f"{plan.epoch}-{last_epoch}"
    microbatches = "by tokens" if by_tokens else f"{plan.microbatches} {_TIMES} {plan.microbatch_rows}"
    samples = plan.samples_per_step * ranks
    rate = f"{_TIMES} {plan.lr_factor:.3g}"
    cells = f"  {epochs:<9}{plan.batch_size:<13}{microbatches:<15}{samples:<17}{plan.steps:<9}{rate}"
    if plan.refused_batch_size is None:
        return cells
    return f"{cells.ljust(76)}   <- {plan.refused_batch_size} asked for, does not fit"


def _count(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
