"""Forecasts as text and as JSON, and the command that trains with their settings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import value_at
from torchtune_adaptive.forecast.alternatives import Alternative
from torchtune_adaptive.forecast.rehearse_recipe import Forecast
from torchtune_adaptive.forecast.request import PlanRequest, is_lora, trains_on_pairs, trains_on_rollouts
from torchtune_adaptive.formatting import count_of, format_bytes, in_columns
from torchtune_adaptive.rehearse.result import FRAGMENTED
from torchtune_adaptive.rehearse.start import ONE_MACHINE
from torchtune_adaptive.rl.settings import POLICY_SECTION

Row = dict[str, Any]


def as_text(forecast: Forecast) -> str:
    """Return the heading, a table for each stage, the memory of training, the command and notes."""
    lines = [_heading(forecast.request)]
    for stage in forecast.searches or [""]:
        cells = [_cells(row) for row in rows_of(forecast) if row["stage"] == stage]
        lines += [f"{stage}:"] * bool(stage) + [in_columns([("rows", "tokens", "allocated", "reserved", ""), *cells])]
        if (reason := forecast.searches.get(stage, {}).get("reason")) is not None:
            lines.append(f"{count_of(forecast.searches[stage]['rows'], 'row')}: {reason}")
    rehearsal = forecast.rehearsal
    if forecast.fits:
        sizes = [format_bytes(forecast.most[f"{name}_bytes"]) for name in ("allocated", "reserved")]
        flushing = sum(step["flushes"] > 0 for step in rehearsal.steps)
        steps = f"the cache is flushed in {flushing} of {count_of(len(rehearsal.steps), 'step')}"
        over_time = f"; {steps} (slow)" if flushing else ""
        if forecast.request.lengths:
            over_time = f"; {count_of(len(rehearsal.caught), 'recovery', 'recoveries')}, {steps}"
        lines.append(f"in training: {sizes[0]} allocated, {sizes[1]} reserved at most{over_time}")
        lines.append(f"train with: {training_command(forecast)}")
    else:
        lines.append(forecast.why_not)
        lines += [FRAGMENTED.format("PYTORCH_ALLOC_CONF=expandable_segments:True")] * rehearsal.fragmented
    return "\n".join([*lines, *(f"note: {note}" for note in notes(forecast))])


def alternatives_as_text(tried: Sequence[Alternative]) -> str:
    """Return a table of other settings, and the command for the first that fits."""
    if not tried:
        return "no other setting fits, not even on 8 times the ranks: lower sequence_length, or use a larger card"
    lines: list[tuple[str, ...]] = [("with", "", "reserved")]
    for overrides, forecast in tried:
        rows = f" {count_of(forecast.rows, 'row')}" if forecast.rows else ""
        fits = f"fits{rows}" if forecast.fits else "does not fit"
        lines.append((" ".join(overrides), fits, format_bytes(forecast.most["reserved_bytes"])))
    commands = [training_command(each.forecast) for each in tried if each.forecast.fits]
    return "\n".join([in_columns(lines), *(f"train the first with: {command}" for command in commands[:1])])


def as_json(forecasts: Sequence[Forecast], tried: Sequence[Alternative] = ()) -> str:
    """Return every figure as JSON."""
    failed = [f"{_heading(each.request)}: {each.why_not}" for each in forecasts if not each.fits]
    result = {
        "predictions": [row for forecast in forecasts for row in rows_of(forecast)],
        "commands": [training_command(forecast) for forecast in forecasts if forecast.fits],
        "alternatives": [
            {
                "overrides": " ".join(overrides),
                "ranks": forecast.request.ranks,
                "tokens": forecast.request.length,
                "rows": forecast.rows,
                "fits": forecast.fits,
                "reserved_bytes": forecast.most["reserved_bytes"],
            }
            for overrides, forecast in tried
        ],
        "over_time": [
            {
                "ranks": forecast.request.ranks,
                "rows": forecast.rows,
                "steps": forecast.rehearsal.steps,
                "recoveries": len(forecast.rehearsal.caught),
            }
            for forecast in forecasts
            if forecast.request.lengths
        ],
        "notes": [*dict.fromkeys(note for forecast in forecasts for note in notes(forecast)), *failed],
    }
    return json.dumps(result, indent=2)


def _heading(request: PlanRequest) -> str:
    cfg, on_rollouts, length = request.cfg, trains_on_rollouts(request.cfg), f"{request.length} tokens"
    usable = request.gpu.memory - request.overhead_bytes
    parts = [
        str((cfg.policy_model if POLICY_SECTION in cfg else cfg.model).get(COMPONENT)).rpartition(".")[2],
        "lora" if is_lora(cfg) else "full",
        *["PPO" if POLICY_SECTION in cfg else "GRPO"] * on_rollouts,
        *["pairs"] * trains_on_pairs(cfg),
        count_of(request.ranks, "rank"),
        *["compiled"] * bool(cfg.get("compile")),
        f"prompts of {length}, answers of {cfg.max_generated_tokens}" if on_rollouts else length,
        f"{format_bytes(usable)} usable of {format_bytes(request.gpu.memory)}",
    ]
    return " · ".join(parts)


def rows_of(forecast: Forecast) -> Iterator[Row]:
    """Yield a row for each size that a search measured, or for the given size."""
    request = forecast.request
    given: Row = {
        "ranks": request.ranks,
        "usable_bytes": forecast.rehearsal.usable_bytes,
        "stage": "",
        "tokens": request.length,
        "rows": forecast.rows,
        "allocated_bytes": forecast.most["allocated_bytes"] or None,
        "reserved_bytes": forecast.most["reserved_bytes"] or None,
        "bound_by": None,
        "fits": forecast.fits,
        "allocator_retries": forecast.most["flushes"],
        "chosen": forecast.fits,
    }
    if not forecast.searches:
        yield given
    for stage, search in forecast.searches.items():
        for probe in search.get("probes") or search["points"]:
            peak, phases = probe["peak"], probe["peak"]["phase_bytes"]
            chosen = forecast.fits and probe["rows"] == search.get("rows")
            # only then do the rehearsed steps have microbatches of this size
            in_steps = chosen and not stage and not request.lengths
            yield {
                **given,
                "stage": stage,
                "tokens": probe["length"] or request.length,
                "rows": probe["rows"],
                "allocated_bytes": max(phases.values()) if peak["fits"] else None,
                "reserved_bytes": given["reserved_bytes"] if in_steps else None,
                "bound_by": max(phases, key=phases.get) if phases else None,
                "fits": peak["fits"],
                "allocator_retries": peak["retries"],
                "chosen": chosen,
            }


def _cells(row: Row) -> tuple[str, ...]:
    remark = "<- chosen" if row["chosen"] else ""
    if not row["fits"]:
        remark = "out of memory"
    elif row["allocator_retries"]:
        remark = "fits only by flushing the cache (slow)"
    sizes = (format_bytes(row[name]) if row[name] else "" for name in ("allocated_bytes", "reserved_bytes"))
    return str(row["rows"] or 1), str(row["tokens"]), *sizes, remark


def notes(forecast: Forecast) -> list[str]:
    """Return the assumptions and limits of a forecast."""
    request, cfg, on_rollouts = forecast.request, forecast.request.cfg, trains_on_rollouts(forecast.request.cfg)
    given = request.plan.sequence_length or request.lengths or value_at(cfg, "tokenizer.max_seq_len")
    microbatches, configured = int(cfg.get("gradient_accumulation_steps") or 1), int(cfg.batch_size)
    searches = on_rollouts or cfg.get("use_maximum_batch_size")
    other_rows = forecast.fits and not searches and forecast.rows not in (None, configured)
    overhead = format_bytes(request.overhead_bytes)
    applies = {
        f"{overhead} are reserved for the CUDA context, NCCL and libraries (memory_overhead)": True,
        "reserved is for rows of one length; varying lengths fragment the cache more": not request.lengths,
        "in each step, the rank with the longest samples is rehearsed": bool(request.lengths) and request.ranks > 1,
        f"sequence_length is not set: {request.length} tokens are assumed": not given,
        "in the rehearsed steps, answers end at once: the table of stages has the memory of whole answers": on_rollouts,
        "a row is a pair of answers of this length": trains_on_pairs(cfg),
        "fsdp_cpu_offload is True: weights, gradients and optimizer state are on the host": cfg.get("fsdp_cpu_offload"),
        f"batch_size={forecast.rows} makes a rank's step {(forecast.rows or 0) * microbatches} samples instead of "
        f"{configured * microbatches}; use_maximum_batch_size=True finds the same rows and keeps the step": other_rows,
    }
    return [note for note, holds in applies.items() if holds]


def training_command(forecast: Forecast) -> str:
    """Return the command that trains with these settings, with the overrides of the request."""
    request, rows, cfg = forecast.request, forecast.rows, forecast.request.cfg
    own_keys = {field.name for field in fields(request.plan)}
    words = {word.partition("=")[0]: word for word in request.overrides if word.partition("=")[0] not in own_keys}
    changes: dict[str, object] = {}
    if trains_on_rollouts(cfg):
        changes["use_maximum_batch_size"] = True
    elif rows is not None and not cfg.get("use_maximum_batch_size"):  # otherwise the run searches itself
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
    parts = ["tune run", launcher, request.recipe, "--config", request.config_name, shlex.join(words.values())]
    return " ".join(parts).rstrip()
