"""The Python interface to rehearsals, which the command uses, too."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gpu_rehearsal.errors import ConfigError
from gpu_rehearsal.formatting import is_whole, parse_bytes
from gpu_rehearsal.gpus import Gpu, gpu_named
from gpu_rehearsal.processes.commands import check_command
from gpu_rehearsal.repeating import rehearse_with_values
from gpu_rehearsal.report.result import RehearsalResult
from gpu_rehearsal.settings import RankSettings
from gpu_rehearsal.sweep import largest, range_in

STEPS = 10
GPU = "h100"


def rehearse(
    command: str | Sequence[str], gpu: str | Gpu = GPU, ranks: int | None = None, *,
    rank: int = 0, together: bool | Sequence[int] = False, devices: int | None = None, memory: str | int | None = None,
    memory_overhead: str | int | None = None, steps: int = STEPS, skew: float = 1,
    fixed: Mapping[str, float] | None = None, timeout: float | None = None, without_data: bool = False,
    once: bool = False, quiet: bool = False,
) -> RehearsalResult:  # fmt: skip
    """Rehearse a command, without a GPU, and return its verdict, its peaks and its estimated time.

        from gpu_rehearsal import rehearse

        found = rehearse("train.py --batch-size 8", gpu="h100", ranks=8)
        print(found.verdict(), found.run_peaks["reserved_bytes"], found.peak_by_kind)
        assert found.fits, found.as_text()

    The arguments are the options of the command `rehearse`. With a range such as `{1:64}` in the command, the result
    is that of the largest value that fits, which is its `largest`. `together=True` rehearses all ranks. The output of
    the script is copied to standard error or, if `quiet` and there is no answer, kept as `output`.

    Raises ConfigError if an argument is invalid, NullCudaError if this machine cannot rehearse, and, if quiet,
    KeyboardInterrupt after Ctrl-C. Every other end of the script is a result.
    """
    words = shlex.split(command) if isinstance(command, str) else list(command)
    check_command(words)
    several = None if together is False else [] if together is True else together
    for name, value, accepted, allowed in (
        ("gpu", gpu, isinstance(gpu, str | Gpu), "one name, and call rehearse again for another GPU"),
        ("ranks", ranks, ranks is None or is_whole(ranks, at_least=1), "a whole number from 1"),
        ("devices", devices, devices is None or is_whole(devices, at_least=1), "a whole number from 1"),
        ("rank", rank, is_whole(rank, at_least=0), "a whole number from 0"),
        ("steps", steps, is_whole(steps, at_least=0), "a whole number from 0"),
        ("together", together, several is None or _are_ranks(several), "True or a list of ranks"),
        ("skew", skew, _is_number(skew) and 1 <= skew <= 1e6, "a number from 1 to 10⁶"),
        ("timeout", timeout, timeout is None or (_is_number(timeout) and 0 < timeout <= 1e6), "seconds up to 10⁶"),
        ("once", once, type(once) is bool, "True or False"),
        ("fixed", fixed, fixed is None or _are_numbers(fixed), "numbers by FILE:LINE"),
    ):
        if not accepted:
            raise ConfigError(f"{name} is {value!r}: pass {allowed}")
    if rank and together is not False:
        raise ConfigError("--together reports the fullest rank, and --rank a single one: leave out one of them")
    card = gpu_named(gpu) if isinstance(gpu, str) else gpu
    if memory is not None:
        card = card._replace(memory=parse_bytes(memory, "memory"))
    settings = RankSettings(
        max([rank, *(several or [])]), ranks, steps=steps, devices=devices, together=several, skew=skew,
        overhead_bytes=None if memory_overhead is None else parse_bytes(memory_overhead, "memory_overhead"),
        fixed=fixed or {}, timeout=timeout, without_data=without_data,
    )  # fmt: skip
    if range_in(words):
        report = (lambda _: None) if quiet else partial(print, file=sys.stderr, flush=True)
        return largest(partial(rehearse_with_values, settings, quiet=True, once=once), words, card, ranks, report)
    return rehearse_with_values(settings, words, card, ranks, quiet=quiet, once=once)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _are_numbers(fixed: Any) -> bool:
    return isinstance(fixed, Mapping) and all(map(_is_number, fixed.values()))


def _are_ranks(together: Any) -> bool:
    return isinstance(together, list | tuple) and all(is_whole(each, at_least=0) for each in together)
