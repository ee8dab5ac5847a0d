"""The answer to a question, as text and as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import value_at
from torchtune_adaptive.forecast.question import Question
from torchtune_adaptive.forecast.rehearse_recipe import Found
from torchtune_adaptive.forecast.which_recipe import is_lora, trains_on_pairs, trains_on_rollouts
from torchtune_adaptive.formatting import count_of, format_bytes, in_columns
from torchtune_adaptive.rehearse.result import FRAGMENTED
from torchtune_adaptive.rehearse.start import ONE_MACHINE
from torchtune_adaptive.rl.settings import POLICY_SECTION

Row = dict[str, Any]


def text(found: Found) -> str:
    lines = [_heading(found.question)]
    for stage in found.searches or [""]:
        cells = [_cells(row) for row in rows_of(found) if row["stage"] == stage]
        lines += [f"{stage}:"] * bool(stage) + [in_columns([("rows", "tokens", "allocated", "reserved", ""), *cells])]
        if (reason := found.searches.get(stage, {}).get("reason")) is not None:
            lines.append(f"{count_of(found.searches[stage]['rows'], 'row')}: {reason}")
    if found.fits:
        sizes = [format_bytes(found.most[f"{name}_bytes"]) for name in ("allocated", "reserved")]
        flushing = sum(step["flushes"] > 0 for step in found.rehearsed.steps)
        steps = f"the cache is flushed in {flushing} of {count_of(len(found.rehearsed.steps), 'step')}"
        over_time = f"; {steps} (slow)" if flushing else ""
        if found.question.lengths:
            over_time = f"; {count_of(len(found.rehearsed.caught), 'recovery', 'recoveries')}, {steps}"
        lines.append(f"in training: {sizes[0]} allocated, {sizes[1]} reserved at most{over_time}")
        lines.append(f"train with: {command(found.question, found.rows)}")
    else:
        lines.append(found.why_not)
        segments = FRAGMENTED.format("expandable_segments=True")
        lines += [segments] * (found.rehearsed.fragmented and not found.question.plan.expandable_segments)
    return "\n".join([*lines, *(f"note: {note}" for note in notes(found))])


def _heading(question: Question) -> str:
    cfg, rolls_out, length = question.cfg, trains_on_rollouts(question.cfg), f"{question.length} tokens"
    usable = question.gpu.memory - question.overhead_bytes
    parts = [
        str((cfg.policy_model if POLICY_SECTION in cfg else cfg.model).get(COMPONENT)).rpartition(".")[2],
        "lora" if is_lora(cfg) else "full",
        *["PPO" if POLICY_SECTION in cfg else "GRPO"] * rolls_out,
        *["pairs"] * trains_on_pairs(cfg),
        count_of(question.ranks, "rank"),
        *["compiled"] * bool(cfg.get("compile")),
        f"prompts of {length}, answers of {cfg.max_generated_tokens}" if rolls_out else length,
        f"{format_bytes(usable)} usable of {format_bytes(question.gpu.memory)}",
    ]
    return " · ".join(parts)


def rows_of(found: Found) -> Iterator[Row]:
    """A row for each size that was measured, and for the one that was trained with."""
    base = {"ranks": found.question.ranks, "usable_bytes": found.rehearsed.usable_bytes}
    most = found.most
    for stage, search in found.searches.items():
        for probe in search.get("probes") or search["points"]:
            peak, phases = probe["peak"], probe["peak"]["phase_bytes"]
            chosen = found.fits and probe["rows"] == search.get("rows")
            of_steps = chosen and not stage and not found.question.lengths  # which are of such rows then
            yield {
                **base,
                "stage": stage,
                "tokens": probe["length"] or found.question.length,
                "rows": probe["rows"],
                "allocated_bytes": max(phases.values()) if peak["fits"] else None,
                "reserved_bytes": (most["reserved_bytes"] or None) if of_steps else None,
                "bound_by": max(phases, key=phases.get) if phases else None,
                "fits": peak["fits"],
                "allocator_retries": peak["retries"],
                "chosen": chosen,
            }
    if not found.searches:
        yield {
            **base,
            "stage": "",
            "tokens": found.question.length,
            "rows": found.rows,
            "allocated_bytes": most["allocated_bytes"] or None,
            "reserved_bytes": most["reserved_bytes"] or None,
            "bound_by": None,
            "fits": found.fits,
            "allocator_retries": most["flushes"],
            "chosen": found.fits,
        }


def _cells(row: Row) -> tuple[str, ...]:
    remark = "<- chosen" if row["chosen"] else ""
    if not row["fits"]:
        remark = "out of memory"
    elif row["allocator_retries"]:
        remark = "fits only by flushing the cache (slow)"
    sizes = (format_bytes(row[name]) if row[name] else "" for name in ("allocated_bytes", "reserved_bytes"))
    return str(row["rows"] or 1), str(row["tokens"]), *sizes, remark


def notes(found: Found) -> list[str]:
    """What the answer assumes, and what it does not cover."""
    question, cfg, rolls_out = found.question, found.question.cfg, trains_on_rollouts(found.question.cfg)
    given = question.plan.sequence_length or question.lengths or value_at(cfg, "tokenizer.max_seq_len")
    microbatches, configured = int(cfg.get("gradient_accumulation_steps") or 1), int(cfg.batch_size)
    searches = rolls_out or cfg.get("use_maximum_batch_size")
    other_rows = found.fits and not searches and found.rows not in (None, configured)
    overhead = format_bytes(question.overhead_bytes)
    said = {
        f"{overhead} are left to the CUDA context, NCCL and libraries (memory_overhead)": True,
        "reserved is for rows of one length; lengths that vary leave more holes in the cache": not question.lengths,
        "in each step, the rank with the longest samples is rehearsed": bool(question.lengths) and question.ranks > 1,
        f"no sequence_length is given: {question.length} tokens are assumed": not given,
        "in the rehearsed steps, answers end at once: each stage's own row says what its longest need": rolls_out,
        "rows are pairs, both answers of so many tokens": trains_on_pairs(cfg),
        "fsdp_cpu_offload is True: weights, gradients and optimizer state are on the host": cfg.get("fsdp_cpu_offload"),
        f"batch_size={found.rows} makes {(found.rows or 0) * microbatches} samples a step of each rank, where the "
        f"config has {configured * microbatches}: use_maximum_batch_size=True finds as many rows and keeps the "
        "samples": other_rows,
    }
    return [note for note, holds in said.items() if holds]


def command(question: Question, rows: int | None) -> str:
    """What trains so; with the words of the question."""
    asked = {field.name for field in fields(question.plan)}
    words = {word.partition("=")[0]: word for word in question.given if word.partition("=")[0] not in asked}
    cfg = question.cfg
    changes: dict[str, object] = {}
    if trains_on_rollouts(cfg):
        changes["use_maximum_batch_size"] = True
    elif rows is not None and not cfg.get("use_maximum_batch_size"):  # else the run finds them itself
        changes["batch_size"] = rows
    if question.plan.sequence_length is not None and value_at(cfg, "tokenizer.max_seq_len") != question.length:
        changes["tokenizer.max_seq_len"] = question.length
    if question.plan.memory_limit is not None and question.settings.adaptive.memory_limit is not None:
        changes["adaptive.memory_limit"] = "null"
    words |= {key: f"{key}={value}" for key, value in changes.items()}
    machines, left = divmod(question.ranks, ONE_MACHINE)
    launcher = f"--nproc_per_node {question.ranks}"
    if machines > 1 and not left:
        rendezvous = "--rdzv_backend c10d --rdzv_endpoint NODE0:29400"
        launcher = f"--nnodes {machines} --nproc_per_node {ONE_MACHINE} {rendezvous}"
    segments = question.plan.expandable_segments
    variable = "" if segments is None else f"PYTORCH_ALLOC_CONF=expandable_segments:{segments} "
    parts = ["tune run", launcher, question.recipe, "--config", question.config_name, shlex.join(words.values())]
    return variable + " ".join(parts).rstrip()


def as_json(answers: Sequence[Found], alternatives: Sequence[Row] = ()) -> str:
    said = dict.fromkeys(note for found in answers for note in notes(found))
    answer = {
        "predictions": [row for found in answers for row in rows_of(found)],
        "commands": [command(found.question, found.rows) for found in answers if found.fits],
        "alternatives": list(alternatives),
        "over_time": [
            {
                "ranks": found.question.ranks,
                "rows": found.rows,
                "steps": found.rehearsed.steps,
                "recoveries": len(found.rehearsed.caught),
            }
            for found in answers
            if found.question.lengths
        ],
        "notes": [*said, *(f"{_heading(found.question)}: {found.why_not}" for found in answers if not found.fits)],
    }
    return json.dumps(answer, indent=2)
