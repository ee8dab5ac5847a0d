"""Rehearse an unmodified training script on GPUs that are absent.

  rehearse --ranks 8 --gpu h100 -- train.py --batch-size 12

runs train.py as rank 0 of 8 on a null device, and reports the memory that torch's allocator reserves
in each step. `-m module`, `torchrun ...`, `tune run ...` and `accelerate launch ...` work as well.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gpu_rehearsal.ci.cases import run_cases
from gpu_rehearsal.device import MAX_DEVICES
from gpu_rehearsal.errors import ConfigError, NullCudaError
from gpu_rehearsal.gpus import GPUS, gpu_named
from gpu_rehearsal.hangs.dumps import read_dumps
from gpu_rehearsal.hangs.explain import as_lines, verdict
from gpu_rehearsal.interface import GPU, STEPS, rehearse
from gpu_rehearsal.progress import progress_lines
from gpu_rehearsal.report.verdict import Outcome
from gpu_rehearsal.sweep import as_table, compare, range_in

FAILED, HANGS = 2, 3
CLOSED_PIPE, INTERRUPTED = 141, 130
"""Exit statuses after the output pipe was closed, and after Ctrl-C, as shells report them."""
_STATUS = {True: 0, False: 1, None: FAILED}
OPTIONS = "rank", "together", "devices", "memory", "memory_overhead", "steps", "skew", "timeout", "without_data", "once"
"""Options that are arguments of `rehearse` with the same names."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its status. Print an error as one line."""
    parser = parser_of_command()
    options = parser.parse_args(arguments)
    status = FAILED
    try:
        with _printing(), progress_lines():
            status = run(options)
    except ConfigError as error:
        parser.error(str(error))
    except NullCudaError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or 'stdout'}: {error.strerror}; correct the path", file=sys.stderr)
    sys.exit(status)


@contextmanager
def _printing() -> Iterator[None]:
    """Exit without a traceback after Ctrl-C, or if the output pipe was closed, for example by `| head`. Print "?" for a
    character that the terminal's encoding does not have."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # a pipe cannot seek
            sys.stdout.reconfigure(errors="replace")
    try:
        yield
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the flush at exit would fail again
        sys.exit(CLOSED_PIPE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def parser_of_command() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="rehearse", usage="rehearse [options] -- command", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"gpu-rehearsal {version('gpu-rehearsal')}")
    parser.add_argument(
        "--ranks", type=_counts, default=[None], metavar="N",
        help="number of ranks, or several: 1,2,4,8 (default: from the launcher, else 1)",
    )  # fmt: skip
    parser.add_argument("--rank", type=int, metavar="R", help="the rank to rehearse (default: 0)")
    parser.add_argument(
        "--together", type=partial(_counts, least=0), nargs="?", const=True, metavar="R,R",
        help="rehearse all ranks, or these, as processes that exchange objects, host tensors and small integers",
    )  # fmt: skip
    parser.add_argument(
        "--devices", type=int, choices=range(1, MAX_DEVICES + 1), metavar="N",
        help="GPUs that the process sees (default: one per rank, up to 8)",
    )  # fmt: skip
    parser.add_argument(
        "--gpu", metavar="NAME", type=lambda text: text.split(","),
        help=f"model of GPU, or several: 4090,h100 (default: {GPU}): {', '.join(sorted(GPUS))}",
    )  # fmt: skip
    parser.add_argument(
        "--price", type=_prices, default={}, metavar="NAME=X,...",
        help="prices of GPUs per hour, as in h100=2.5,4090=0.4: compare these GPUs, with the cost of training",
    )  # fmt: skip
    parser.add_argument("--memory", help="memory of a GPU, for example 80GB or 24GiB (default: from --gpu)")
    parser.add_argument(
        "--memory-overhead", metavar="MEMORY",
        help="memory of the CUDA context, NCCL and libraries (default: 3GiB; one rank 1.3GiB)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=partial(_count, least=0), metavar="N",
        help=f"stop after N steps (default: {STEPS}; 0: run to the end)",
    )  # fmt: skip
    parser.add_argument(
        "--skew", type=float, metavar="X",
        help="let a router send X times the average number of tokens to the first 1/X of its experts (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--fixed", type=_fixed, action="append", default=[], metavar="FILE:LINE=N",
        help="let this line read N from the GPU; the report names lines whose values matter",
    )  # fmt: skip
    parser.add_argument(
        "--once", action="store_true", default=None,
        help="do not rehearse again with other values where the script reads computed numbers",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, metavar="S", help="kill the script after S seconds")
    parser.add_argument(
        "--without-data", action="store_true", default=None,
        help="replace a recipe's weights, tokenizer and data; samples have the length that a search measures",
    )  # fmt: skip
    parser.add_argument(
        "--dumps", metavar="PATH",
        help="find the hang in dumps of NCCL's flight recorder: their folder, or the prefix of their names",
    )  # fmt: skip
    parser.add_argument("--cases", metavar="FILE", help="rehearse the commands of this TOML file (docs/ci.md)")
    parser.add_argument("--jobs", type=_count, default=1, metavar="N", help="cases in parallel")
    parser.add_argument("--update-peaks", action="store_true", help="record the peaks of the cases")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="output format")
    words = " ".join(re.findall(r"(?m)^  (?:-h, )?(--[a-z-]+)", parser.format_help()))
    parser.add_argument(
        "--completion", action="version", version=f"complete -o default -W '{words}' rehearse",
        help='complete options in bash and zsh: add eval "$(rehearse --completion)" to ~/.bashrc',
    )  # fmt: skip
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="command", help="the script and its arguments")
    return parser


def run(options: argparse.Namespace) -> int:
    """Rehearse the command, print the result, and return the exit status."""
    command = options.words[1:] if options.words[:1] == ["--"] else options.words
    given: dict[str, Any] = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
    given["fixed"] = dict(options.fixed)
    _refuse_other_options(options)
    if options.dumps:
        ranks, calls, hang = read_dumps(options.dumps)
        text = (
            [verdict(hang), "", *as_lines(hang)] if hang else [f"{calls:,} calls of {ranks} ranks compared: all agree"]
        )
        print(
            json.dumps({"calls": calls, "hang": hang or None}, indent=2)
            if options.format == "json"
            else "\n".join(text)
        )
        return HANGS if hang else 0
    if options.cases:
        as_json = options.format == "json"
        return run_cases(Path(options.cases), options.jobs, options.update_peaks, as_json=as_json)
    prices = {gpu_named(name).name: price for name, price in options.price.items()}
    cards = [*dict.fromkeys(gpu_named(name) for name in options.gpu or prices or [GPU])]
    if other := prices.keys() - {card.name for card in cards}:
        raise ConfigError(f"--price has {min(other)}, which --gpu does not compare: add it there, or leave out --gpu")
    if len(cards) * len(options.ranks) == 1 and not prices:
        found = rehearse(command, cards[0], options.ranks[0], **given)
        print(json.dumps(found.as_dict(), indent=2) if options.format == "json" else found.as_text())
        return HANGS if found.outcome is Outcome.HANGS else _STATUS[found.fits]
    if range_in(command):
        raise ConfigError("a range is searched on a single GPU: give one --gpu and one --ranks")
    rows = compare(partial(rehearse, quiet=True, **given), command, cards, options.ranks, prices)
    print(json.dumps([row.as_dict() for row in rows], indent=2) if options.format == "json" else as_table(rows))
    if len(rows) < len(cards) * len(options.ranks):
        raise KeyboardInterrupt  # for the exit status
    return min(_STATUS[row.fits] for row in rows)


def _refuse_other_options(options: argparse.Namespace) -> None:
    """Refuse the options of cases without a file of cases, and with one, those that it contains instead."""
    of_cases = {"jobs", "update_peaks"}
    defaults = vars(parser_of_command().parse_args([]))
    given = {name for name, default in defaults.items() if getattr(options, name) != default}
    if not options.cases and (wrong := given & of_cases):
        raise ConfigError(f"--{min(wrong).replace('_', '-')} needs --cases: pass a file of cases, or leave it out")
    if options.cases and (wrong := given - of_cases - {"cases", "format"}):
        raise ConfigError(f"--cases reads {min(wrong).replace('words', 'the command')} from its file: set it there")


def _count(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from {least}")
    return int(text)


def _counts(text: str, least: int = 1) -> list[int]:
    return [*dict.fromkeys(_count(each, least) for each in text.split(","))]


def _prices(text: str) -> dict[str, float]:
    if not re.fullmatch(r"[\w-]+=\d*\.?\d+(,[\w-]+=\d*\.?\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text} is not a list of prices per GPU and hour, as in h100=2.5,4090=0.4")
    return {name: float(price) for name, _, price in (each.partition("=") for each in text.split(","))}


def _fixed(text: str) -> tuple[str, float]:
    found = re.fullmatch(r"(.+:\d+)=(-?\d+(\.\d+)?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is not a line and a number, as in train.py:12=512")
    return found[1], float(found[2]) if found[3] else int(found[2])
