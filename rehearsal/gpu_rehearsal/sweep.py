"""Compare GPUs and numbers of ranks, and search for the largest value of an argument that fits, in parallel."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from gpu_rehearsal.errors import CannotRehearse, ConfigError
from gpu_rehearsal.formatting import count_of
from gpu_rehearsal.gpus import Gpu
from gpu_rehearsal.processes.server import end_with_parent, interrupted_by_signals
from gpu_rehearsal.progress import set_case
from gpu_rehearsal.report.record import GIB
from gpu_rehearsal.report.result import RehearsalResult
from gpu_rehearsal.report.step_time import UNCERTAINTY, StepTime, seconds_text
from gpu_rehearsal.settings import ONE_MACHINE

_RANGE = re.compile(r"\{(\d+):(\d+)\}")
Rehearse = Callable[[Sequence[str], Gpu, int | None], RehearsalResult]
_Key = TypeVar("_Key")
_Result = TypeVar("_Result")


class SweepRow(NamedTuple):
    """A GPU, a number of ranks, and the result of their rehearsal."""

    gpu: Gpu
    found: RehearsalResult
    name: str = ""
    """The name of a case."""
    failures: Sequence[str] = ()
    """The expectations of the case that are not met."""
    report: str = ""
    """The report of a case that is not as expected."""
    grown_bytes: int | None = None
    """The allocated memory above the recorded peak of the case."""
    price: float | None = None
    """Of a GPU for an hour."""

    @property
    def fits(self) -> bool | None:
        """None if the rehearsal gave no answer."""
        return self.found.fits

    @property
    def time(self) -> StepTime | None:
        """Return the time of a step; None if the script does not fit."""
        return self.found.recorded_time() if self.fits else None

    @property
    def tokens_per_second(self) -> float | None:
        """Return the tokens per second of all ranks; None if unknown."""
        time, work = self.time, self.found.work
        return (
            work.tokens * self.found.ranks / work.ranks_per_sample / time.seconds
            if time and work and work.tokens
            else None
        )

    @property
    def cost_per_step(self) -> float | None:
        """Return the cost of a step on all ranks; None if the price or the time is unknown."""
        return self.price * self.found.ranks * self.time.seconds / 3600 if self.price and self.time else None

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Return the cost of a million tokens; None if the price or the number of tokens is unknown."""
        rate = self.tokens_per_second
        return self.price * self.found.ranks / 3600 / rate * 1e6 if self.price and rate else None

    def as_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
        time = self.time
        return {
            "gpu": self.gpu.name, "ranks": self.found.ranks, "fits": self.fits, "verdict": self.found.verdict(),
            **self.found.run_peaks, "usable_bytes": self.found.usable_bytes,
            "seconds": time.seconds if time else None, "range": time.range if time else None,
            "tokens_per_second": self.tokens_per_second, "searches": self.found.searches,
            "price": self.price, "cost_per_step": self.cost_per_step,
            "cost_per_million_tokens": self.cost_per_million_tokens,
            "accelerators": _accelerators(self) if self.fits else None, "nodes": _nodes(self),
            **({"case": self.name, "failures": self.failures, "cpu_s": self.found.cpu_s} if self.name else {}),
        }  # fmt: skip


def compare(
    rehearse: Rehearse, command: Sequence[str], cards: Sequence[Gpu], ranks: Sequence[int | None],
    prices: Mapping[str, float] | None = None,
) -> list[SweepRow]:  # fmt: skip
    """Rehearse the command on each GPU and number of ranks; return a row for each, or those known after Ctrl-C."""
    rows = dict.fromkeys((card, each) for each in ranks for card in cards)
    try:
        for (card, each), found in in_parallel(rehearse, {key: (command, *key) for key in rows}):
            rows[card, each] = SweepRow(card, found, price=(prices or {}).get(card.name))
            ended = f"{card.name}, {count_of(found.ranks, 'rank')}: {found.verdict()}"
            print(ended, file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        missing = sum(row is None for row in rows.values())
        print(f"interrupted: {missing} of {count_of(len(rows), 'case')} not rehearsed", file=sys.stderr)
    return [row for row in rows.values() if row is not None]


def as_table(rows: Sequence[SweepRow]) -> str:
    """Return the rows as a table."""
    lines = [f"{'gpu':>9} {'ranks':>6}  {'fits':<9} {'reserved, of GiB':>17} {'time per step':>14} {'tokens/s':>10}"]
    priced = any(row.price is not None for row in rows)
    by_token = any(row.cost_per_million_tokens for row in rows)
    lines[0] += f" {'cost/M tokens' if by_token else 'cost/step':>14}" * priced
    lines[0] += "  case" * any(row.name for row in rows)
    for row in rows:
        time, rate, ranks = row.time, row.tokens_per_second, row.found.ranks
        needed_bytes = max(row.found.run_peaks["reserved_bytes"], 0 if row.fits else row.found.usable_bytes)
        memory = f"{'' if row.fits else '> '}{needed_bytes / GIB:.1f} of {row.found.usable_bytes / GIB:.1f}"
        lines.append(
            f"{row.gpu.name:>9} {ranks:>6}  {_WORDS[row.fits]:<9} {memory if row.fits is not None else '':>17}"
            f" {seconds_text(time.seconds) if time else '':>14} {f'{rate:,.0f}' if rate else '':>10}"
            + (f" {cost:>14.3g}" if (cost := row.cost_per_million_tokens if by_token else row.cost_per_step) else "")
            + (f"  {count_of(row.found.most_rows, 'row')}" if row.found.most_rows else "")
            + f"  {row.name}" * bool(row.name)
            + (f"  {row.grown_bytes / GIB:+.2f} GiB" if row.grown_bytes is not None and row.fits else "")
            + "  <- NOT AS EXPECTED" * bool(row.failures)
        )
    lines = [line.rstrip() for line in lines]
    low, high = UNCERTAINTY
    notes = [f"Times are estimated: a step may take {low} to {high} times as long."] * any(row.time for row in rows)
    for nodes in sorted({_nodes(row) for row in rows if row.fits and priced}):
        fitting = ", ".join(_accelerators(row) for row in rows if row.fits and _nodes(row) == nodes)
        notes.append(f"For SkyPilot: accelerators: {{{fitting}}}" + f", num_nodes: {nodes}" * (nodes > 1))
    notes += dict.fromkeys(row.found.verdict() for row in rows if row.fits is None and not row.name)
    return "\n".join([*lines, *[""] * bool(notes), *notes])


def _accelerators(row: SweepRow) -> str:
    """Return the GPUs of a node, as SkyPilot names them."""
    name = f"RTX{row.gpu.name}" if row.gpu.name.isdecimal() else _SKYPILOT.get(row.gpu.name, row.gpu.name.upper())
    return f"{name}:{row.found.ranks // _nodes(row)}"


def _nodes(row: SweepRow) -> int:
    return -(-row.found.ranks // ONE_MACHINE)


_SKYPILOT = {"a100": "A100-80GB", "a100-40": "A100", "a6000": "RTXA6000"}
_WORDS = {True: "yes", False: "no", None: "no answer"}


def range_in(command: Sequence[str]) -> tuple[int, int] | None:
    """Return the limits of a range such as {1:64} in a command; None without a range. Raise ConfigError if invalid."""
    found = [match for word in command for match in _RANGE.finditer(word)]
    if len(found) > 1:
        raise ConfigError(f"{found[1][0]}: only one range can be searched at a time")
    if found and not 1 <= int(found[0][1]) < int(found[0][2]):
        raise ConfigError(f"{found[0][0]}: give two numbers from 1, of which the second is larger")
    return (int(found[0][1]), int(found[0][2])) if found else None


def largest(
    rehearse: Rehearse, command: Sequence[str], card: Gpu, ranks: int | None, report: Callable[[str], object]
) -> RehearsalResult:
    """Return the rehearsal of the largest value that fits or, if none fits, of the smallest.

    The search assumes that a smaller value does not need more memory.
    """
    limits = range_in(command)
    assert limits is not None
    low, high = limits[0] - 1, limits[1] + 1  # `low` fits, `high` does not
    found: dict[int, RehearsalResult] = {}
    tried = set(limits)
    try:
        while tried:
            cases = {value: ([_RANGE.sub(str(value), word) for word in command], card, ranks) for value in tried}
            for value, result in in_parallel(rehearse, cases):
                report(f"{value}: {result.verdict()}")
                if not result.fits and result.out_of_memory is None:
                    return replace(result, cpu_s=result.cpu_s + sum(each.cpu_s for each in found.values()))
                found[value] = result
                low, high = (max(low, value), high) if result.fits else (low, min(high, value))
            tried = {(2 * low + high) // 3, (low + 2 * high) // 3} - {low} if high - low > 1 else set()
    finally:
        if high - low > 1:
            known = [f"{low} fits"] * (low in found) + [f"{high} does not fit"] * (high in found)
            report(f"the search has not ended; known so far: {', '.join(known) or 'nothing'}")
    best, most = (found[low], low) if low in found else (found[min(found)], 0)
    return replace(best, largest=most, cpu_s=sum(each.cpu_s for each in found.values()))


def in_parallel(
    work: Callable[..., _Result], cases: Mapping[_Key, tuple[Any, ...]], jobs: int | None = None
) -> Generator[tuple[_Key, _Result]]:
    """Call `work` with the arguments of each case, in forked processes; yield each result when it is ready."""
    workers, others = max(1, min(len(cases), jobs or len(os.sched_getaffinity(0)))), multiprocessing.active_children()
    with interrupted_by_signals(), ProcessPoolExecutor(workers, initializer=_start_worker) as pool:
        try:
            waiting = {
                pool.submit(_run_case, f"rehearsal {at} of {len(cases)}{_in_brackets(key)}", work, *case): key
                for at, (key, case) in enumerate(cases.items(), 1)
            }
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in {*multiprocessing.active_children()}.difference(others):
                worker.terminate()
            if isinstance(error, BrokenProcessPool):
                raise CannotRehearse("a process of a rehearsal was killed: is this machine out of memory?") from error
            raise


def _in_brackets(key: object) -> str:
    """Return the value of a range or the name of a case. The GPU and the ranks of a comparison are shown anyway."""
    return f" ({key})" * isinstance(key, str | int)


def _start_worker() -> None:
    """Ignore Ctrl-C in a worker, because the parent handles it and terminates its workers."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run_case(name: str, work: Callable[..., _Result], *case: Any) -> _Result:
    set_case(name)
    try:
        return work(*case)
    except KeyboardInterrupt:
        os._exit(1)  # so that the worker does not start another case
