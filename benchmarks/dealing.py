"""Measure the benefit and cost of distributing samples over ranks: simulated waits of up to 512 ranks, a real exchange.

Goal: a step takes at most 1.02 times its useful work at any number of ranks, and is planned in less than 30 ms at 512
ranks of 64 samples. The work of a step is its tokens; ranks synchronize after each microbatch, so the duration of a
microbatch is that of the rank with most tokens. The exchange is real, between two otherwise idle ranks of this machine.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from benchmarks.packing import DISTRIBUTIONS, LONGEST, Lengths, RandomTokens
from benchmarks.results import Result
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.limits import TokenLimit
from torchtune_adaptive.engine.plans import assign_to_ranks, plan_step, spread
from torchtune_adaptive.tune.checked_dataset import CheckedDataset
from torchtune_adaptive.tune.dealing import READ_AHEAD, Dealer

RANKS = (2, 8, 64, 512)
BUDGET = TokenLimit(8 * LONGEST)
EXCHANGING = 2
"""Number of ranks in the real exchange."""
STEPS = 24
"""Steps of an exchange. Each has three turns (weigh, send, receive); the first and the last have fewer."""
FIGURES = ("exchange ms", "host ms", "sent kB")


def run(pairs: int) -> Result:
    rows = [
        {**simulate(lengths, ranks, pairs), **(exchange(lengths) if ranks == EXCHANGING else dict.fromkeys(FIGURES))}
        for lengths in DISTRIBUTIONS.values()
        for ranks in RANKS
    ]
    note = (
        "step time over useful work, simulated: stayed and dealt, both without padding; deal ms: CPU time of the deal "
        "on each rank. For 2 ranks on one machine, also the measured exchange of a step per rank, medians: "
        "exchange ms: wall time, on an idle machine; host ms: CPU time, including the deal and gloo's threads; "
        "sent kB: the table of sizes, and the samples that the other rank runs"
    )
    return Result(rows, note)


def simulate(lengths: Lengths, ranks: int, steps: int) -> dict[str, Any]:
    draw = random.Random(ranks)
    stayed, dealt, times = [], [], []
    for _ in range(steps):
        drawn = [[lengths.draw_length(draw) for _ in range(lengths.samples_per_step)] for _ in range(ranks)]
        flat = [length for own in drawn for length in own]
        began = time.process_time()
        rank_of = assign_to_ranks(flat, ranks)
        times.append(time.process_time() - began)
        shares: list[list[int]] = [[] for _ in range(ranks)]
        for length, rank in zip(flat, rank_of, strict=True):
            shares[rank].append(length)
        stayed.append(step_over_work(drawn))
        dealt.append(step_over_work(shares))
    figures = {"stayed": stayed, "dealt": dealt}
    means = {name: statistics.mean(each) for name, each in figures.items()}
    return {"lengths": lengths.name, "ranks": ranks, **means, "deal ms": 1e3 * statistics.median(times)}


def step_over_work(shares: Sequence[Sequence[int]]) -> float:
    """Step time over work, planned as StepRunner plans: as few microbatches as the fullest rank needs, on all ranks."""
    plans = [plan_step(own, BUDGET, padded=False) for own in shares]
    most = max(map(len, plans))
    sizes = [
        [sum(own[index] for index in rows) for rows in spread(plan, own, BUDGET, most, padded=False)]
        for plan, own in zip(plans, shares, strict=True)
    ]
    return sum(map(max, zip(*sizes, strict=True))) * len(shares) / sum(map(sum, sizes))


def exchange(lengths: Lengths) -> dict[str, float]:
    return dict(zip(FIGURES, run_on_ranks(EXCHANGING, time_exchange, lengths)[0], strict=True))


def time_exchange(lengths: Lengths) -> tuple[float, float, float]:
    """Collective: return wall time (ms), CPU time (ms) and sent kB of this rank, per step."""
    count, ranks, rank = lengths.samples_per_step, dist.get_world_size(), dist.get_rank()
    dataset = CheckedDataset(RandomTokens(lengths, STEPS * count * ranks, seed=0))
    steps = [[dataset[(step * count + at) * ranks + rank] for at in range(count)] for step in range(STEPS)]
    dealer = Dealer(dataset.kind, cost=float)
    # measure time first, then repeat the exchange and count the bytes, so that counting does not take time
    turns = [(time.perf_counter(), time.process_time()) for _ in dealer.deal(steps)]
    took = [
        1e3 * statistics.median(later - earlier for earlier, later in pairwise(clock[READ_AHEAD:-READ_AHEAD]))
        for clock in zip(*turns, strict=True)
    ]
    with CountSent() as sent:
        list(dealer.deal(steps))
    return took[0], took[1], sent.bytes / STEPS / 1e3


class CountSent(ExitStack):
    """Context manager that counts the bytes that a dealer sends to other ranks."""

    def __enter__(self) -> CountSent:
        self.bytes = 0
        told, given = dist.all_reduce, dist.all_to_all_single

        def tell(table: Tensor, **options: Any) -> Any:
            self.bytes += table.nbytes
            return told(table, **options)

        def give(received: Tensor, sent: Tensor, incoming: list[int], outgoing: list[int], **options: Any) -> Any:
            self.bytes += sum(outgoing) - outgoing[dist.get_rank()]
            return given(received, sent, incoming, outgoing, **options)

        self.enter_context(mock.patch.multiple(dist, all_reduce=tell, all_to_all_single=give))
        return self
