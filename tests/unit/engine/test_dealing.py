import math
import random
import statistics
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.engine.plans import deal


def loads(costs: list[float], rank_of: tuple[int, ...], ranks: int) -> list[float]:
    found = [0.0] * ranks
    for cost, rank in zip(costs, rank_of, strict=True):
        found[rank] += cost
    return found


@given(st.integers(1, 9), st.integers(1, 16), st.randoms())
def test_every_rank_gets_as_many_and_none_much_more(ranks: int, each: int, draw: random.Random):
    costs = [float(draw.randint(1, 4096)) for _ in range(ranks * each)]
    rank_of = deal(costs, ranks)
    assert Counter(rank_of) == dict.fromkeys(range(ranks), each)
    # the fullest is over the mean by less than one sample
    assert max(loads(costs, rank_of, ranks)) <= sum(costs) / ranks + max(costs)
    assert rank_of == deal(costs, ranks)


def test_samples_that_cannot_be_dealt_equally_are_refused():
    with pytest.raises(ValueError, match="7 samples cannot be dealt equally to 2 ranks"):
        deal([1.0] * 7, 2)


@pytest.mark.parametrize(("median", "spread", "each"), [(51, 1.0, 64), (170, 0.6, 32), (512, 0.5, 16)])
@pytest.mark.parametrize("ranks", [2, 8, 64, 512])
def test_hardly_any_rank_waits(median: int, spread: float, each: int, ranks: int):
    """Lengths as of instructions, dialogues and documents, cut at 512; a step of each rank."""
    draw = random.Random(ranks)
    worst = []
    for _ in range(max(1, 40 // ranks)):
        costs = [min(512.0, math.ceil(draw.lognormvariate(math.log(median), spread))) for _ in range(ranks * each)]
        dealt = loads(costs, deal(costs, ranks), ranks)
        worst.append(max(dealt) / statistics.mean(dealt))
    assert statistics.mean(worst) <= 1.02


def test_planning_for_512_ranks_takes_a_moment():
    draw = random.Random(0)
    costs = [draw.random() for _ in range(512 * 64)]
    times = []
    for _ in range(5):
        began = time.process_time()
        deal(costs, 512)
        times.append(time.process_time() - began)
    assert min(times) < 0.1  # 30 ms on an idle core
