"""Rehearse an unmodified training script on GPUs that are absent.

  tune-adaptive rehearse --ranks 8 --gpu h100 -- train.py --batch-size 12

runs train.py as rank 0 of 8 on a null device, and reports the memory that torch's allocator reserves
in each step. `-m module`, `torchrun ...`, `tune run ...` and `accelerate launch ...` work as well.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtune_adaptive.null_cuda import MAX_DEVICES, NullCudaError, bytes_of
from torchtune_adaptive.rehearse.gpus import GPUS, Gpu, local_gpu
from torchtune_adaptive.rehearse.real import Comparison, run_real
from torchtune_adaptive.rehearse.remedies import try_remedies
from torchtune_adaptive.rehearse.result import RehearsalResult
from torchtune_adaptive.rehearse.start import check_command, rehearse
from torchtune_adaptive.rehearse.sweep import as_json as rows_as_json
from torchtune_adaptive.rehearse.sweep import as_table, compare, largest, range_in

STEPS = 10
GPU = "h100"
_FITS, _DOES_NOT_FIT, FAILED = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "--ranks", type=_numbers, default=[None], metavar="N",
        help="number of ranks, or several: 1,2,4,8 (default: from the launcher, else 1)",
    )  # fmt: skip
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to rehearse (default: 0)")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="GPUs that the process sees (default: one per rank, up to 8)"
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"model of GPU, or several: 4090,h100 (default: {GPU}): {', '.join(sorted(GPUS))}",
    )
    parser.add_argument("--real", action="store_true", help="run on the GPUs of this machine, with the same report")
    parser.add_argument("--compare", action="store_true", help="run on the GPUs of this machine, rehearse, and compare")
    parser.add_argument(
        "--advise", action="store_true", help="if memory runs out, rehearse arguments of transformers or torchtitan too"
    )
    parser.add_argument(
        "--price", type=_prices, action="extend", default=[], metavar="NAME=PRICE",
        help="price of a GPU for an hour, for example h100=2.49; adds the cost of a million tokens",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=_bytes, help="memory of a GPU, for example 80GB or 24GiB (default: from --gpu)"
    )
    parser.add_argument(
        "--memory-overhead", type=_bytes, metavar="MEMORY",
        help="memory of the CUDA context, NCCL and libraries (default: 3GiB; one rank 1GiB)",
    )  # fmt: skip
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help=f"stop after N steps (default: {STEPS}; 0: run to the end)",
        metavar="N",
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the steps, for example plan.png")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="command", help="the script and its arguments")


def run(options: argparse.Namespace) -> int:
    """Rehearse the command, print the result, and return the exit status."""
    command = options.words[1:] if options.words[:1] == ["--"] else options.words
    if not command:
        options.refuse("no script to rehearse; for example: -- train.py --batch-size 12")
    for name, least in {"rank": 0, "steps": 0, "devices": 1}.items():
        if (number := getattr(options, name)) is not None and number < least:
            options.refuse(f"--{name} is {number}; the minimum is {least}")
    prices = dict(options.price)
    on_gpus = options.real or options.compare
    try:
        check_command(command)
        searched = range_in(command)
        cards = _cards(options.gpu or GPU)
    except (OSError, ValueError) as error:
        options.refuse(str(error))
    if options.devices is not None and options.devices > MAX_DEVICES:
        options.refuse(f"--devices is {options.devices}; the maximum is {MAX_DEVICES}")
    if options.picture is not None:
        _check_picture(options)
    if unpriced := prices.keys() - {card.name for card in cards}:
        options.refuse(f"--price names {', '.join(sorted(unpriced))}, which --gpu does not: add it to --gpu")
    if options.memory is not None:
        cards = [card._replace(memory=options.memory) for card in cards]
    several = len(cards) * len(options.ranks) > 1 or bool(prices)
    simulated = options.gpu, options.memory, options.ranks[0], options.devices
    if on_gpus and (several or searched or any(each is not None for each in simulated)):
        options.refuse(
            "--real and --compare run the command as it is, on the GPUs of this machine: leave out --gpu, --memory, "
            "--ranks, --devices, --price and ranges (for several ranks, put torchrun before the script)"
        )
    if (several or searched) and options.picture is not None:
        options.refuse("--picture draws a single rehearsal: give one --gpu, one --ranks, no --price and no range")
    if several and searched:
        options.refuse("a range is searched on a single GPU: give one --gpu, one --ranks and no --price")
    settings: dict[str, Any] = {
        "rank": options.rank, "overhead_bytes": options.memory_overhead, "steps": options.steps,
        "devices": options.devices,
    }  # fmt: skip
    try:
        if several:
            rows = compare(partial(_quietly, settings), command, cards, options.ranks, prices)
            print(rows_as_json(rows) if options.format == "json" else as_table(rows))
            return _FITS if any(row.fits for row in rows) else min(FAILED if row.fits is None else 1 for row in rows)
        if searched:
            return _search(options, command, cards[0], settings)
        if on_gpus:
            shown: RehearsalResult | Comparison = (found := run_real(command, options.steps))
        else:
            shown = found = rehearse(command, cards[0], ranks=options.ranks[0], **settings)
        if options.compare and found.gpu is not None:
            settings |= {"rank": found.rank, "devices": found.visible_devices}
            shown = Comparison(rehearse(command, local_gpu(found.gpu), ranks=found.ranks, **settings), found)
    except NullCudaError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    if options.picture is not None and (found.steps or found.errors):
        from torchtune_adaptive.rehearse.result import draw

        draw(found, options.picture)
    remedies = None
    if options.advise and found.out_of_memory and not on_gpus:
        remedies = try_remedies(partial(_quietly, settings), command, cards[0], found.ranks)
    if options.format == "json":
        tried = {} if remedies is None else {"remedies": [row.as_dict() for row in remedies]}
        print(json.dumps({**json.loads(shown.as_json()), **tried}, indent=2))
    else:
        print(shown.as_text())
        if remedies is not None:
            print(f"\n{as_table(remedies) if remedies else 'no other argument was found with which it fits'}")
    return _FITS if found.fits else _DOES_NOT_FIT if found.out_of_memory else FAILED


def _quietly(settings: dict[str, Any], command: list[str], card: Gpu, ranks: int | None) -> RehearsalResult:
    """Rehearse without the script's output, which several scripts would mix."""
    with open(os.devnull, "w") as nowhere:
        return rehearse(command, card, ranks=ranks, output=nowhere, **settings)


def _search(options: argparse.Namespace, command: list[str], card: Gpu, settings: dict[str, Any]) -> int:
    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    value, found = largest(partial(_quietly, settings), command, card, options.ranks[0], report)
    if options.format == "json":
        print(json.dumps({"largest": value, **json.loads(found.as_json())}, indent=2))
    else:
        print(f"largest that fits: {value}\n" if value else "none fits; the smallest:\n" * bool(found.out_of_memory))
        print(found.as_text())
    return _FITS if value else _DOES_NOT_FIT if found.out_of_memory else FAILED


def _check_picture(options: argparse.Namespace) -> None:
    """Refuse a picture that could not be saved, before the script runs."""
    if options.picture.suffix not in (".png", ".svg", ".pdf"):
        options.refuse(f"--picture is {options.picture}: use a name that ends in .png, .svg or .pdf")
    if find_spec("matplotlib") is None:
        options.refuse("--picture needs matplotlib: pip install matplotlib")
    try:
        options.picture.open("ab").close()
    except OSError as error:
        options.refuse(f"--picture is {options.picture}, which cannot be written: {error.strerror}")


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1, or several with commas between them")
    return [int(each) for each in dict.fromkeys(text.split(","))]


def _cards(text: str) -> list[Gpu]:
    names = dict.fromkeys(text.lower().split(","))
    if unknown := [name for name in names if name not in GPUS]:
        raise ValueError(f"unknown GPU {unknown[0]!r}: choose from {', '.join(sorted(GPUS))}")
    return [GPUS[name] for name in names]


def _prices(text: str) -> list[tuple[str, float]]:
    if not re.fullmatch(r"[\w-]+=\d+(\.\d+)?(,[\w-]+=\d+(\.\d+)?)*", text):
        raise argparse.ArgumentTypeError(f"{text}: give a GPU and a price, for example h100=2.49")
    return [(name.lower(), float(price)) for name, _, price in (each.partition("=") for each in text.split(","))]


def _bytes(text: str) -> int:
    try:
        return 0 if re.fullmatch(r"0\s*([KMG]i?B)?", text) else bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
