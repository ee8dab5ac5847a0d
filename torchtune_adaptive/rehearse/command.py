"""Rehearse an unmodified training script on GPUs that are absent.

  tune-adaptive rehearse --ranks 8 --gpu h100 -- train.py --batch-size 12

runs train.py as rank 0 of 8 on a null device, and reports the memory that torch's allocator reserves
in each step. `-m module`, `torchrun ...`, `tune run ...` and `accelerate launch ...` work as well.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import partial
from pathlib import Path

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import parse_amount
from torchtune_adaptive.null_cuda import MAX_DEVICES, NullCudaError
from torchtune_adaptive.rehearse.gpus import GPUS, Gpu
from torchtune_adaptive.rehearse.result import MOST_INVERTED, Outcome
from torchtune_adaptive.rehearse.start import RankSettings, check_command, rehearse, rehearse_quietly
from torchtune_adaptive.rehearse.sweep import SweepRow, as_table, compare, largest, range_in

STEPS = 10
GPU = "h100"
FAILED, HANGS = 2, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--ranks", type=_counts, default=[None], metavar="N",
        help="number of ranks, or several: 1,2,4,8 (default: from the launcher, else 1)",
    )  # fmt: skip
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to rehearse (default: 0)")
    parser.add_argument(
        "--together", type=partial(_counts, least=0), nargs="?", const=[], metavar="R,R",
        help="rehearse all ranks, or these, as processes that exchange objects, host tensors and small integers",
    )  # fmt: skip
    parser.add_argument(
        "--devices", type=int, choices=range(1, MAX_DEVICES + 1), metavar="N",
        help="GPUs that the process sees (default: one per rank, up to 8)",
    )  # fmt: skip
    parser.add_argument(
        "--gpu", metavar="NAME", help=f"model of GPU, or several: 4090,h100 (default: {GPU}): {', '.join(sorted(GPUS))}"
    )
    parser.add_argument(
        "--memory", type=_bytes, help="memory of a GPU, for example 80GB or 24GiB (default: from --gpu)"
    )
    parser.add_argument(
        "--memory-overhead", type=_bytes, metavar="MEMORY",
        help="memory of the CUDA context, NCCL and libraries (default: 3GiB; one rank 1GiB)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=lambda text: _counts(text, least=0)[0], default=STEPS, metavar="N",
        help=f"stop after N steps (default: {STEPS}; 0: run to the end)",
    )  # fmt: skip
    parser.add_argument(
        "--skew", type=float, default=1, metavar="X",
        help="let a router send X times the average number of tokens to the first 1/X of its experts (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--fixed", type=_fixed, action="append", default=[], metavar="FILE:LINE=N",
        help="let this line read the integer N from the GPU, instead of 0; the report names such lines",
    )  # fmt: skip
    parser.add_argument(
        "--without-data", action="store_true",
        help="replace a recipe's weights, tokenizer and data; samples have the length that a search measures",
    )  # fmt: skip
    parser.add_argument("--snapshot", metavar="FILE", help="write the memory snapshot FILE for pytorch.org/memory_viz")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="command", help="the script and its arguments")


def run(options: argparse.Namespace) -> int:
    """Rehearse the command, print the result, and return the exit status."""
    command = options.words[1:] if options.words[:1] == ["--"] else options.words
    try:
        check_command(command)
        searched = range_in(command)
        cards = _cards(options.gpu or GPU)
    except (OSError, ValueError) as error:
        options.refuse(str(error))
    if options.memory is not None:
        cards = [card._replace(memory=options.memory) for card in cards]
    conflicts = _conflicts(options, cards, bool(searched)) | {
        "--without-data needs a recipe of this package: tune run adaptive_...": options.without_data
        and not any(Path(word).name.startswith("adaptive_") for word in command)
    }
    for message, applies in conflicts.items():
        if applies:
            options.refuse(message)
    last = max([options.rank, *(options.together or [])])
    settings = RankSettings(last, options.ranks[0], 0, options.memory_overhead, options.steps, options.devices)
    settings = settings._replace(together=options.together, skew=max(1, options.skew), fixed=dict(options.fixed))
    settings = settings._replace(without_data=options.without_data)
    mode = _compare if _is_table(options, cards) else _search if searched else _run
    try:
        return mode(options, command, cards, settings)
    except NullCudaError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


def _is_table(options: argparse.Namespace, cards: list[Gpu]) -> bool:
    return len(cards) * len(options.ranks) > 1


def _conflicts(options: argparse.Namespace, cards: list[Gpu], searched: bool) -> dict[str, bool]:
    """Return the errors about combinations of options, each with True if the options have it."""
    table = _is_table(options, cards)
    no_folder = bool(options.snapshot) and not Path(options.snapshot).parent.is_dir()
    return {
        "a range is searched on a single GPU: give one --gpu and one --ranks": table and searched,
        "--together reports the fullest rank, and --rank a single one: leave out one of them": bool(options.rank)
        and options.together is not None,
        "--snapshot needs an existing folder, one --gpu, one --ranks and no range": no_folder
        or (bool(options.snapshot) and (table or searched)),
    }


def _run(options: argparse.Namespace, command: list[str], cards: list[Gpu], settings: RankSettings) -> int:
    card = cards[0]
    found = rehearse(command, card, settings._replace(snapshot=options.snapshot or ""))
    if found.fits and (places := found.guessed_conditions[:MOST_INVERTED]):
        print(f"rehearse: guesses decide at {', '.join(places)}: trying the other results, too", file=sys.stderr)
        inverted = (settings._replace(inverted=place) for place in places)
        others = [rehearse_quietly(each, command, card, found.ranks) for each in inverted]
        found = found.or_larger(dict(zip(places, others, strict=True)))
    print(json.dumps(found.as_dict(), indent=2) if options.format == "json" else found.as_text())
    return HANGS if found.outcome is Outcome.HANGS else _status(found.answer)


def _compare(options: argparse.Namespace, command: list[str], cards: list[Gpu], settings: RankSettings) -> int:
    rows: list[SweepRow] = compare(partial(rehearse_quietly, settings), command, cards, options.ranks)
    print(json.dumps([row.as_dict() for row in rows], indent=2) if options.format == "json" else as_table(rows))
    return min(_status(row.fits) for row in rows)


def _search(options: argparse.Namespace, command: list[str], cards: list[Gpu], settings: RankSettings) -> int:
    report = partial(print, file=sys.stderr, flush=True)
    value, found = largest(partial(rehearse_quietly, settings), command, cards[0], settings.ranks, report)
    if options.format == "json":
        print(json.dumps({"largest": value, **found.as_dict()}, indent=2))
    else:
        print(f"largest that fits: {value}\n" if value else "none fits; the smallest:\n" * bool(found.out_of_memory))
        print(found.as_text())
    return _status(found.answer)


def _status(fits: bool | None) -> int:
    return {True: 0, False: 1, None: FAILED}[fits]


def _counts(text: str, least: int = 1) -> list[int]:
    numbers = dict.fromkeys(text.split(","))
    if not all(each.isdecimal() and int(each) >= least for each in numbers):
        raise argparse.ArgumentTypeError(f"{text} is not a number from {least}, or several with commas between them")
    return [int(each) for each in numbers]


def _cards(text: str) -> list[Gpu]:
    names = dict.fromkeys(text.lower().split(","))
    if unknown := [name for name in names if name not in GPUS]:
        raise ValueError(f"unknown GPU {unknown[0]!r}: choose from {', '.join(sorted(GPUS))}")
    return [GPUS[name] for name in names]


def _fixed(text: str) -> tuple[str, int]:
    if not re.fullmatch(r".+:\d+=\d+", text):
        raise argparse.ArgumentTypeError(f"{text} is not a line and a number, as in train.py:12=512")
    place, _, number = text.rpartition("=")
    return place, int(number)


def _bytes(text: str) -> int:
    try:
        return 0 if text == "0" else parse_amount(text, "memory")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
