"""The answer to a question, as text and as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import value_at
from torchtune_adaptive.forecast.measure import Found
from torchtune_adaptive.forecast.question import Question
from torchtune_adaptive.forecast.which_recipe import is_lora, trains_on_pairs, trains_with_ppo
from torchtune_adaptive.rehearse.launchers import ONE_MACHINE
from torchtune_adaptive.text import count_of, format_bytes, in_columns

Row = dict[str, Any]


def text(found: Found) -> str:
    lines = [_heading(found.question)]
    for stage in found.searches or [""]:
        rows = [row for row in rows_of(found) if row["stage"] == stage]
        cells = [_cells(row) for row in rows]
        lines += [f"{stage}:"] * bool(stage) + [in_columns([("rows", "tokens", "allocated", "reserved", ""), *cells])]
        if (reason := found.searches.get(stage, {}).get("reason")) is not None:
            lines.append(f"{count_of(found.searches[stage]['rows'], 'row')}: {reason}")
    if not found.fits:
        lines.append(found.why_not)
    else:
        most = found.most
        trains = f"{format_bytes(most['allocated_bytes'])} allocated, {format_bytes(most['reserved_bytes'])} reserved"
        lines.append(f"in training: {trains} at most{_over_time(found)}")
        lines.append(f"train with: {command(found.question, found.rows)}")
    return "\n".join([*lines, *(f"note: {note}" for note in notes(found))])


def _over_time(found: Found) -> str:
    flushing = sum(step["flushes"] > 0 for step in found.rehearsed.steps)
    steps = f"in {flushing} of {count_of(len(found.rehearsed.steps), 'step')}"
    if found.question.lengths:
        recoveries = count_of(len(found.rehearsed.caught), "recovery", "recoveries")
        return f"; {recoveries}, the cache is flushed {steps}"
    return f"; the cache is flushed {steps} (slow)" if flushing else ""


def _heading(question: Question) -> str:
    cfg, length = question.cfg, f"{question.length} tokens"
    if trains_with_ppo(cfg):
        length = f"prompts of {length}, answers of {cfg.max_generated_tokens}"
    usable = question.gpu.memory - question.overhead_bytes
    model = cfg.policy_model if trains_with_ppo(cfg) else cfg.model
    parts = [
        str(model.get(COMPONENT)).rpartition(".")[2],
        "PPO" if trains_with_ppo(cfg) else "lora" if is_lora(cfg) else "full",
        *["pairs"] * trains_on_pairs(cfg),
        count_of(question.ranks, "rank"),
        *["compiled"] * bool(cfg.get("compile")),
        length,
        f"{format_bytes(usable)} usable of {format_bytes(question.gpu.memory)}",
    ]
    return " · ".join(parts)


def rows_of(found: Found) -> Iterator[Row]:
    """A row for each size that was measured, and for the one that was trained with."""
    base = {"ranks": found.question.ranks, "usable_bytes": found.rehearsed.usable_bytes}
    trained = {"reserved_bytes": found.most["reserved_bytes"] or None}
    for stage, search in found.searches.items():
        for probe in search.get("probes") or search["points"]:
            phases = probe["peak"]["phase_bytes"]
            chosen = found.fits and probe["rows"] == search.get("rows")
            yield {
                **base,
                "stage": stage,
                "tokens": probe["length"] or found.question.length,
                "rows": probe["rows"],
                "allocated_bytes": max(phases.values()) if probe["peak"]["fits"] else None,
                "reserved_bytes": None,
                **(trained if chosen and not stage else {}),
                "bound_by": max(phases, key=phases.get) if phases else None,
                "fits": probe["peak"]["fits"],
                "allocator_retries": probe["peak"]["retries"],
                "chosen": chosen,
            }
    if not found.searches:
        yield {
            **base,
            "stage": "",
            "tokens": found.question.length,
            "rows": found.rows,
            "allocated_bytes": found.most["allocated_bytes"] or None,
            **trained,
            "bound_by": None,
            "fits": found.fits,
            "allocator_retries": found.most["flushes"],
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
    question, cfg = found.question, found.question.cfg
    said = [
        f"{format_bytes(question.overhead_bytes)} are left to the CUDA context, NCCL and libraries (memory_overhead)",
    ]
    if not question.lengths:
        said.append("reserved is for rows of one length; lengths that vary leave more holes in the cache")
    elif question.ranks > 1:
        said.append("in each step, the rank with the longest samples is rehearsed")
    told = question.plan.sequence_length or question.lengths or value_at(cfg, "tokenizer.max_seq_len")
    if not told:
        said.append(f"no sequence_length is given: {question.length} tokens are assumed")
    if trains_with_ppo(cfg):
        said.append("in the rehearsed steps, answers end at once: each stage's own row says what its longest need")
    if trains_on_pairs(cfg):
        said.append("rows are pairs, both answers of so many tokens")
    if cfg.get("fsdp_cpu_offload"):
        said.append("fsdp_cpu_offload is True: weights, gradients and optimizer state are on the host")
    microbatches, configured = int(cfg.get("gradient_accumulation_steps") or 1), int(cfg.batch_size)
    if found.fits and found.rows not in (None, configured) and not trains_with_ppo(cfg):
        said.append(
            f"batch_size={found.rows} makes {found.rows * microbatches} samples a step of each rank, where the config "
            f"has {configured * microbatches}: use_maximum_batch_size=True finds as many rows and keeps the samples"
        )
    return said


def command(question: Question, rows: int | None) -> str:
    """What trains so; with the words of the question."""
    asked = {each.name for each in fields(question.plan)}
    words = {word.partition("=")[0]: word for word in question.given if word.partition("=")[0] not in asked}
    cfg = question.cfg
    if trains_with_ppo(cfg):
        words["use_maximum_batch_size"] = "use_maximum_batch_size=True"
    elif rows is not None:
        words["batch_size"] = f"batch_size={rows}"
        if cfg.get("use_maximum_batch_size"):
            words["use_maximum_batch_size"] = "use_maximum_batch_size=False"
    if question.plan.sequence_length is not None and value_at(cfg, "tokenizer.max_seq_len") != question.length:
        words["tokenizer.max_seq_len"] = f"tokenizer.max_seq_len={question.length}"
    if question.plan.memory_limit is not None and question.settings.adaptive.memory_limit is not None:
        words["adaptive.memory_limit"] = "adaptive.memory_limit=null"
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
        "notes": [*said, *(found.why_not for found in answers if not found.fits)],
    }
    return json.dumps(answer, indent=2)
