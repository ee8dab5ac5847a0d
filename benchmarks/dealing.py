"""What dealing samples to ranks is worth and what it costs: waiting simulated up to 512 ranks, and one real exchange.

Goal: a step takes at most 1.02 times its useful work at any number of ranks, and is planned in less than 30 ms at 512
ranks of 64 samples. The work of a step is its tokens; ranks meet after each microbatch, so a step takes as long as the
fullest rank of each does.
"""

from __future__ import annotations

import pickle
import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from benchmarks.packing import DISTRIBUTIONS, LONGEST, Lengths, RandomTokens
from benchmarks.results import Result
from tests.ranks import run_on_ranks
from torchtune_adaptive.limits import TokenLimit, deal, join_step, spread_joined, tokens_of_joined
from torchtune_adaptive.tune.parts.culprits import NamedSamples
from torchtune_adaptive.tune.run.dealing import Dealer

RANKS = (2, 8, 64, 512)
BUDGET = TokenLimit(8 * LONGEST)
STEPS = 12
"""Of a real exchange; the first two are warm-up."""


def run(pairs: int) -> Result:
    rows = [simulate(lengths, ranks, pairs) for lengths in DISTRIBUTIONS.values() for ranks in RANKS]
    exchanged = [exchange(lengths) for lengths in DISTRIBUTIONS.values()]
    note = (
        "step time over useful work, simulated: stayed and dealt, both without padding; deal ms: CPU time of the deal "
        "on each rank. For 2 ranks on one machine also what an exchange really takes, by wall time where nothing runs "
        f"beside it: {', '.join(exchanged)}"
    )
    return Result(rows, note)


def simulate(lengths: Lengths, ranks: int, steps: int) -> dict[str, Any]:
    draw = random.Random(ranks)
    stayed, dealt, times = [], [], []
    for _ in range(steps):
        drawn = [[lengths.draw_length(draw) for _ in range(lengths.samples_per_step)] for _ in range(ranks)]
        flat = [length for own in drawn for length in own]
        began = time.process_time()
        rank_of = deal(flat, ranks)
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
    """As StepRunner plans: as few microbatches as the fullest rank needs, on all ranks."""
    plans = [join_step(own, BUDGET) for own in shares]
    most = max(map(len, plans))
    sizes = [
        [tokens_of_joined(rows, own) for rows in spread_joined(plan, own, BUDGET, most)]
        for plan, own in zip(plans, shares, strict=True)
    ]
    return sum(map(max, zip(*sizes, strict=True))) * len(shares) / sum(map(sum, sizes))


def exchange(lengths: Lengths) -> str:
    milliseconds, sent_bytes = run_on_ranks(2, time_exchange, lengths)[0]
    return f"{lengths.name} {milliseconds:.1f} ms and {sent_bytes / 1e3:.0f} kB a step"


def time_exchange(lengths: Lengths) -> tuple[float, float]:
    """Collective: what a step's exchange takes here, and the bytes of the samples of this rank."""
    count, ranks, rank = lengths.samples_per_step, dist.get_world_size(), dist.get_rank()
    dataset = NamedSamples(RandomTokens(lengths, STEPS * count * ranks, seed=0))
    steps = [[dataset[(step * count + at) * ranks + rank] for at in range(count)] for step in range(STEPS)]
    arrivals = [time.perf_counter()]
    for _ in Dealer(dataset, cost=float).deal(steps):
        arrivals.append(time.perf_counter())
    between = [later - earlier for earlier, later in pairwise(arrivals)]
    return 1e3 * statistics.median(between[2:]), statistics.mean(len(pickle.dumps(step)) for step in steps)
