"""Find settings with which a run fits: rehearse changes of its arguments in parallel, and return those that fit.

This module has the arguments of transformers' Trainer and of torchtitan. `forecast.alternatives` has config keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from torchtune_adaptive.rehearse.gpus import Gpu
from torchtune_adaptive.rehearse.sweep import Rehearse, SweepRow, in_parallel, ranking_of, row_of


class TrainerArguments(NamedTuple):
    """The arguments of a trainer that change the memory of a step."""

    recognized_by: str
    """A pattern: a command with an argument that matches it belongs to this trainer."""
    batch_size: str
    accumulation: str
    """The argument for gradient accumulation, which keeps the samples of a step; "" if there is none."""
    others: Sequence[tuple[str, str]]


TRAINERS = (
    TrainerArguments(
        r"--(per_device_train_batch_size|gradient_accumulation_steps|output_dir)",
        "--per_device_train_batch_size", "--gradient_accumulation_steps",
        (
            ("--gradient_checkpointing", "True"), ("--use_liger_kernel", "True"), ("--optim", "adamw_torch_8bit"),
            ("--optim", "adamw_bnb_8bit"),
        ),
    ),
    TrainerArguments(
        r"--(job|model|training)\.\w+",
        "--training.local_batch_size", "",
        (("--activation_checkpoint.mode", "selective"), ("--activation_checkpoint.mode", "full")),
    ),
)  # fmt: skip
"""transformers' TrainingArguments, and torchtitan."""
MORE_RANKS = 2, 4, 8
"""The multiples of the number of ranks that are tried."""


def that_fit(attempt: Callable[..., Any], cases: Mapping[str, tuple[Any, ...]], enough: int = 0) -> list[Any]:
    """Try the cases in parallel, in this order, and return those that fit. Stop after `enough` of them (0: never)."""
    fitting: list[Any] = []
    with closing(in_parallel(attempt, cases)) as results:
        for _, row in results:
            if row is not None and row.fits:
                fitting.append(row)
            if enough and len(fitting) >= enough:
                break
    return fitting


def argument_changes(command: Sequence[str]) -> list[Mapping[str, str]]:
    """Return single changes of a trainer's arguments: smaller batches with the same samples per step, then others."""
    given = _arguments(command)
    trainer = next((each for each in TRAINERS if any(re.match(each.recognized_by, name) for name in given)), None)
    if trainer is None:
        return []
    found: list[Mapping[str, str]] = []
    batch, accumulated = given.get(trainer.batch_size, ""), given.get(trainer.accumulation, "1")
    for parts in (2, 4, 8) if batch.isdecimal() and accumulated.isdecimal() else ():
        if int(batch) % parts == 0:
            kept = {trainer.accumulation: str(int(accumulated) * parts)} if trainer.accumulation else {}
            found.append({trainer.batch_size: str(int(batch) // parts), **kept})
    return found + [{name: value} for name, value in trainer.others if given.get(name) != value]


def with_changes(command: Sequence[str], changed: Mapping[str, str]) -> list[str]:
    """Return the command with these arguments, which replace those that it has."""
    kept: list[str] = []
    is_value = False
    for word in command:
        if not (is_value and not word.startswith("--")) and _name(word) not in changed:
            kept.append(word)
        is_value = _name(word) in changed and "=" not in word
    return [*kept, *(word for pair in changed.items() for word in pair)]


def _name(word: str) -> str:
    """Return the name of an argument: --batch_size for --batch-size=4; empty for a word that is not an argument."""
    return "--" + word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""


def _arguments(command: Sequence[str]) -> dict[str, str]:
    """Return the arguments of a command and their values; the value of a flag is "True"."""
    values = [*command[1:], "--"]
    return {
        _name(word): word.partition("=")[2] or ("True" if value.startswith("--") else value)
        for word, value in zip(command, values, strict=True)
        if word.startswith("--")
    }


def try_remedies(rehearse: Rehearse, command: Sequence[str], card: Gpu, ranks: int) -> list[SweepRow]:
    """Return the changes with which the command fits, the fastest first. Changes that the script rejects are left out.

    More ranks are tried only if there are several already, because a script for one process may not shard its model.
    """
    cases = {
        " ".join(f"{name} {value}" for name, value in changed.items()): (with_changes(command, changed), card, ranks)
        for changed in argument_changes(command)
    }
    if ranks > 1:
        cases |= {f"--ranks {times * ranks}": (list(command), card, times * ranks) for times in MORE_RANKS}
    attempts = {label: (rehearse, label, *case) for label, case in cases.items()}
    rows = that_fit(_attempt, attempts)
    return sorted(rows, key=ranking_of(rows))


def _attempt(rehearse: Rehearse, label: str, command: Sequence[str], card: Gpu, ranks: int) -> SweepRow:
    found = rehearse(command, card, ranks)
    return row_of(found, card, found.usable_bytes, {}, label)
