"""Print forecasts as text or as JSON, with the command that trains with their settings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from torchtune_adaptive.config.keys import value_at
from torchtune_adaptive.forecast.rehearse_recipe import Forecast
from torchtune_adaptive.forecast.request import PlanRequest
from torchtune_adaptive.formatting import count_of, format_bytes, in_columns
from torchtune_adaptive.rehearse.start import ONE_MACHINE
from torchtune_adaptive.rehearse.step_time import time_lines
from torchtune_adaptive.rehearse.sweep import as_table, ranking_of


def as_text(forecast: Forecast) -> str:
    """Return a heading, a table for each search, memory and time of training, the command, and notes."""
    lines, rehearsal, row = [_heading(forecast.request)], forecast.rehearsal, forecast.row
    for stage, search in forecast.searches.items():
        cells = [_cells(size) for size in sizes_of(forecast) if size["stage"] == stage]
        lines += [f"{stage}:"] * bool(stage) + [in_columns([("rows", "tokens", "allocated", ""), *cells])]
        lines += [f"{count_of(search['rows'], 'row')}: {search['reason']}"] * (search.get("reason") is not None)
    lines.append(forecast.verdict)
    if row.time and rehearsal.work:
        lines += time_lines(row.time, rehearsal.work, row.gpu.name, row.ranks)
    lines += [f"train with: {training_command(forecast)}"] * forecast.fits
    return "\n".join([*lines, *(f"note: {note}" for note in notes(forecast))])


def table(forecasts: Sequence[Forecast]) -> str:
    """Return a table of settings, and the command that trains with the best one that fits."""
    best, *_ = best_first(forecasts)
    command = f"\ntrain with: {training_command(best)}" if best.fits else ""
    return as_table([each.row for each in forecasts]) + command


def best_first(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Sort settings by cost or, without prices, by speed; those that do not fit are last."""
    ranking = ranking_of([each.row for each in forecasts])
    return sorted(forecasts, key=lambda each: ranking(each.row))


def as_json(forecasts: Sequence[Forecast]) -> str:
    """Return an object for each setting: the keys of a row of `tune-adaptive rehearse`, and more."""
    return json.dumps([_as_dict(forecast) for forecast in forecasts], indent=2)


def _as_dict(forecast: Forecast) -> dict[str, Any]:
    return {
        **forecast.row.as_dict(),
        "verdict": forecast.verdict,
        "overrides": " ".join(forecast.request.changes),
        "tokens": forecast.request.length,
        "rows": forecast.rows,
        "allocated_bytes": forecast.maxima["allocated_bytes"],
        "command": training_command(forecast) if forecast.fits else None,
        "sizes": list(sizes_of(forecast)),
        "steps": forecast.rehearsal.timed_steps,
        "notes": notes(forecast),
    }


def _heading(request: PlanRequest) -> str:
    tokens, usable = f"{request.length} tokens", request.gpu.memory - request.overhead_bytes
    if request.recipe.trains_on_rollouts:
        tokens = f"prompts of {tokens}, answers of {request.cfg.max_generated_tokens}"
    memory = f"{format_bytes(usable)} usable of {format_bytes(request.gpu.memory)}"
    return " · ".join([request.config_name, count_of(request.ranks, "rank"), tokens, memory])


def sizes_of(forecast: Forecast) -> Iterator[dict[str, Any]]:
    """Yield each microbatch size that a search measured, stage by stage."""
    for stage, search in forecast.searches.items():
        for probe in search.get("probes") or search["points"]:
            peak = probe["peak"]
            yield {
                "stage": stage,
                "rows": probe["rows"],
                "tokens": probe["length"] or forecast.request.length,
                "allocated_bytes": max(peak["phase_bytes"].values()) if peak["fits"] else None,
                "fits": peak["fits"],
                "flushes": peak["retries"],
                "chosen": forecast.fits and probe["rows"] == search.get("rows"),
            }


def _cells(size: dict[str, Any]) -> tuple[str, ...]:
    remark = "<- chosen" if size["chosen"] else ""
    if not size["fits"]:
        remark = "out of memory"
    elif size["flushes"]:
        remark = "fits only by flushing the cache (slow)"
    allocated = format_bytes(size["allocated_bytes"]) if size["allocated_bytes"] else ""
    return str(size["rows"] or 1), str(size["tokens"]), allocated, remark


def notes(forecast: Forecast) -> list[str]:
    """Return the assumptions and limits of a forecast."""
    request, cfg = forecast.request, forecast.request.cfg
    on_rollouts = request.recipe.trains_on_rollouts
    microbatches, configured = int(cfg.get("gradient_accumulation_steps") or 1), int(cfg.batch_size)
    searches = on_rollouts or cfg.get("use_maximum_batch_size")
    other_rows = forecast.fits and not searches and forecast.rows not in (None, configured)
    overhead = format_bytes(request.overhead_bytes)
    conditions = {
        f"{overhead} are reserved for the CUDA context, NCCL and libraries (memory_overhead)": True,
        "reserved is for rows of one length; varying lengths fragment the cache more": True,
        "in the rehearsed steps, answers end at once: the table of stages has the memory of whole answers": on_rollouts,
        f"batch_size={forecast.rows} makes a rank's step {(forecast.rows or 0) * microbatches} samples instead of "
        f"{configured * microbatches}; use_maximum_batch_size=True finds the same rows and keeps the step": other_rows,
    }
    return [note for note, applies in conditions.items() if applies]


def training_command(forecast: Forecast) -> str:
    """Return the command that trains with these settings and with the overrides of the request."""
    request, rows, cfg = forecast.request, forecast.rows, forecast.request.cfg
    own_keys = {field.name for field in fields(request.plan)}
    words = {word.partition("=")[0]: word for word in request.overrides if word.partition("=")[0] not in own_keys}
    changes: dict[str, object] = {}
    if request.recipe.trains_on_rollouts:
        changes["use_maximum_batch_size"] = True
    elif rows is not None and not cfg.get("use_maximum_batch_size"):  # otherwise, the run searches
        changes["batch_size"] = rows
    if request.plan.sequence_length is not None and value_at(cfg, "tokenizer.max_seq_len") != request.length:
        changes["tokenizer.max_seq_len"] = request.length
    if request.plan.memory_limit is not None and request.settings.adaptive.memory_limit is not None:
        changes["adaptive.memory_limit"] = "null"
    words |= {key: f"{key}={value}" for key, value in changes.items()}
    machines, left = divmod(request.ranks, ONE_MACHINE)
    launcher = f"--nproc_per_node {request.ranks}"
    if machines > 1 and not left:
        rendezvous = "--rdzv_backend c10d --rdzv_endpoint NODE0:29400"
        launcher = f"--nnodes {machines} --nproc_per_node {ONE_MACHINE} {rendezvous}"
    parts = ["tune run", launcher, request.recipe.name, "--config", request.config_name, shlex.join(words.values())]
    return " ".join(parts).rstrip()
