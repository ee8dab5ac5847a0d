"""Rehearse an unmodified training script on GPUs that are absent.

  tune-adaptive rehearse --ranks 8 --gpu h100 -- train.py --batch-size 12

runs train.py as rank 0 of 8 on a null device, and reports the memory that torch's allocator reserves
in each step. `-m module`, `torchrun ...`, `tune run ...` and `accelerate launch ...` work as well.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from torchtune_adaptive.null_cuda import MAX_DEVICES, NullCudaError, bytes_of
from torchtune_adaptive.rehearse.gpus import GPUS
from torchtune_adaptive.rehearse.start import check, rehearse

STEPS = 10
GPU = "h100"
_FITS, _DOES_NOT_FIT, FAILED = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks (default: from the launcher, else 1)")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="the rank to rehearse (default: 0)")
    parser.add_argument("--devices", type=int, metavar="N", help="GPUs that the process uses (default: one)")
    parser.add_argument(
        "--gpu",
        type=str.lower,
        default=GPU,
        choices=sorted(GPUS),
        metavar="NAME",
        help=f"model of GPU (default: {GPU}): {', '.join(sorted(GPUS))}",
    )
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
    for name, least in {"ranks": 1, "rank": 0, "steps": 0, "devices": 1}.items():
        if (number := getattr(options, name)) is not None and number < least:
            options.refuse(f"--{name} is {number}; the minimum is {least}")
    try:
        check(command)
    except (OSError, ValueError) as error:
        options.refuse(str(error))
    if options.devices is not None and options.devices > MAX_DEVICES:
        options.refuse(f"--devices is {options.devices}; the maximum is {MAX_DEVICES}")
    if options.picture is not None:
        _check_picture(options)
    card = GPUS[options.gpu]
    if options.memory is not None:
        card = card._replace(memory=options.memory)
    try:
        found = rehearse(
            command, card, ranks=options.ranks, rank=options.rank, overhead_bytes=options.memory_overhead,
            steps=options.steps, devices=options.devices,
        )  # fmt: skip
    except NullCudaError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    if options.picture is not None and (found.steps or found.errors):
        from torchtune_adaptive.rehearse.result import draw

        draw(found, options.picture)
    print(found.as_json() if options.format == "json" else found.as_text())
    return _FITS if found.fits else _DOES_NOT_FIT if found.out_of_memory else FAILED


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


def _bytes(text: str) -> int:
    try:
        return 0 if re.fullmatch(r"0\s*([KMG]i?B)?", text) else bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
