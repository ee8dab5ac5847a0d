"""Formats tables of searches and profiles for the log."""

from torchtune_adaptive.engine.length_profile import Profile
from torchtune_adaptive.engine.search import Probe, SearchResult
from torchtune_adaptive.formatting import count_of, format_bytes, in_columns

MEASURED = ("peak", "of budget", "time", "")


def search_table(result: SearchResult, sequence_length: int, stage: str = "", sample: str = "row") -> str:
    """Format the probes of a search in order, and mark the one with the chosen rows. `sample` is the noun for a row."""
    budget, chosen = format_bytes(result.budget_bytes), {result.rows: f"<- chosen ({result.reason})"}
    probes = [(probe.rows, *_cells(probe, result.budget_bytes, chosen.get(probe.rows, ""))) for probe in result.probes]
    lines = [
        f"batch search{_named(stage)} · {result.strategy} · {sequence_length} tokens · budget {budget} a rank",
        in_columns([(f"{sample}s", *MEASURED), *probes]),
    ]
    if result.out_of_memory_count:
        lines.append(f"  out of memory in {count_of(result.out_of_memory_count, 'probe')}, recovered")
    return "\n".join(lines)


def profile_table(result: Profile, stage: str = "", length_suffix: str = "") -> str:
    """Format the probes of a profile in order, and the error of the fit. `length_suffix` explains a length that is not
    that of a single sequence, for example of a pair of answers."""
    count, budget = count_of(len(result.points), "probe"), format_bytes(result.budget_bytes)
    points = [(point.rows, point.length, point.tokens, *_cells(point, result.budget_bytes)) for point in result.points]
    lines = [
        f"token budget{_named(stage)} · {count} · budget {budget} a rank",
        in_columns([("rows", "length", "tokens", *MEASURED), *points]),
        f"  fitted over rows and length; held-out probes are at most {100 * result.held_out_error:.1f} % off; "
        f"up to {result.constant_tokens} tokens{length_suffix} fit at any length",
    ]
    return "\n".join(lines)


def _named(stage: str) -> str:
    return f" · {stage}" if stage else ""


def _cells(probe: Probe, budget_bytes: int, chosen: str = "") -> tuple[str, ...]:
    """Format the cells of a probe for the columns `MEASURED`."""
    need, share, peak_bytes, retries = "out of memory", "", probe.peak.peak_bytes, probe.peak.retries
    if peak_bytes is not None:
        need, share = format_bytes(peak_bytes), f"{100 * peak_bytes / budget_bytes:4.0f} %"
    remarks = [
        chosen,
        "held out" if probe.held_out else "",
        "over budget" if (peak_bytes or 0) > budget_bytes else "",
        count_of(retries, "allocator retry", "allocator retries") if retries else "",
    ]
    return need, share, time_of(probe), ", ".join(filter(None, remarks))


def time_of(probe: Probe) -> str:
    """Format the time of a probe."""
    return f"{probe.peak.seconds:.1f} s"
