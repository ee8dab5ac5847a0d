"""Find settings with which a run fits: rehearse changes of its arguments in parallel, and return those that fit.

This module has the arguments of transformers' Trainer, torchtitan and accelerate. `rehearse_recipe` has config keys.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import closing
from itertools import combinations
from typing import NamedTuple

from torchtune_adaptive.rehearse.gpus import Gpu
from torchtune_adaptive.rehearse.start import program_of
from torchtune_adaptive.rehearse.sweep import Rehearse, SweepRow, in_parallel, ranking_of


class TrainerArguments(NamedTuple):
    """The arguments of a trainer that change the memory of a step."""

    recognized_by: str
    """A pattern: a command with an argument that matches it belongs to this trainer."""
    batch_size: str
    accumulation: str
    """The argument for gradient accumulation, which keeps the samples of a step; "" if it is missing."""
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
UNKNOWN_TRAINER = TrainerArguments("", "", "", ())
OF_ACCELERATE = ("--fsdp_activation_checkpointing", "true"), ("--fsdp_offload_params", "true")
"""Options of `accelerate launch`, which have no effect without FSDP. They precede the script."""
ENOUGH = 2
"""Stop after this many combinations that fit."""
MORE_RANKS = 2, 4, 8
"""The multiples of the number of ranks that are tried."""
Words = tuple[str, ...]
"""Arguments that are added to a command. The last value of an argument has effect."""


def that_fit(
    rehearse: Rehearse, command: Sequence[str], card: Gpu, cases: Sequence[tuple[Words, int]], enough: int = 0
) -> list[SweepRow]:
    """Rehearse the command with more arguments, or on other numbers of ranks. Return what fits, the fastest first.

    The cases run in parallel, in this order, until `enough` of them fit (0: all run). A case without an answer, for
    example because the script rejects an argument, is left out.
    """
    fitting: list[SweepRow] = []
    attempts = {(words, ranks): (_with_arguments(command, words), card, ranks) for words, ranks in cases}
    with closing(in_parallel(rehearse, attempts)) as results:
        for (words, tried), found in results:
            change = " ".join(words) or f"{tried} ranks"
            print(f"{change}: {found.verdict()}", file=sys.stderr, flush=True)
            row = SweepRow(card, found, label=" ".join(words))
            if row.fits:
                fitting.append(row)
            if enough and len(fitting) >= enough:
                break
    return sorted(fitting, key=ranking_of(fitting))


def try_remedies(rehearse: Rehearse, command: Sequence[str], card: Gpu, ranks: int) -> list[SweepRow]:
    """Return the changes of a command's arguments with which it fits, the fastest first. If none fits on as many ranks,
    two of them together.

    More ranks are tried only if there are several already, because a script for one process may not shard its model.
    """
    single: list[tuple[Words, int]] = [(words, ranks) for words in argument_changes(command)]
    more: list[tuple[Words, int]] = [((), times * ranks) for times in MORE_RANKS if ranks > 1]
    found = that_fit(rehearse, command, card, [*single, *more])
    if any(row.ranks == ranks for row in found):
        return found
    pairs = [((*one, *other), ranks) for (one, _), (other, _) in combinations(single, 2) if one[0] != other[0]]
    return that_fit(rehearse, command, card, pairs, ENOUGH) + found


def argument_changes(command: Sequence[str]) -> list[Words]:
    """Return single changes of a command's arguments: smaller batches with the same samples per step, then others."""
    given = _arguments(command)
    options = [*OF_ACCELERATE] if program_of(command).startswith("accelerate") else []
    known = (each for each in TRAINERS if any(re.match(each.recognized_by, name) for name in given))
    trainer, found = next(known, UNKNOWN_TRAINER), list[Words]()
    batch, accumulated = given.get(trainer.batch_size, ""), given.get(trainer.accumulation, "1")
    for parts in (2, 4, 8) if batch.isdecimal() and accumulated.isdecimal() else ():
        if int(batch) % parts == 0:
            kept = (trainer.accumulation, str(int(accumulated) * parts)) if trainer.accumulation else ()
            found.append((trainer.batch_size, str(int(batch) // parts), *kept))
    return found + [(name, value) for name, value in (*trainer.others, *options) if given.get(name) != value]


def _with_arguments(command: Sequence[str], words: Words) -> list[str]:
    """Return the command with more arguments: options of accelerate before the script, others at the end."""
    script = next((at for at, word in enumerate(command) if word.endswith(".py")), len(command))
    options = [word for each in OF_ACCELERATE if each[0] in words for word in each]
    return [*command[:script], *options, *command[script:], *(word for word in words if word not in options)]


def _arguments(command: Sequence[str]) -> dict[str, str]:
    """Return the arguments of a command and their values: --batch_size for --batch-size=4; "True" for a flag."""
    values = [*command[1:], "--"]
    return {
        "--" + word[2:].partition("=")[0].replace("-", "_"): word.partition("=")[2]
        or ("True" if value.startswith("--") else value)
        for word, value in zip(command, values, strict=True)
        if word.startswith("--")
    }
