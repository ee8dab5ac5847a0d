"""Searches and token budgets where ranks share samples: all ranks find the same limit, and training is unchanged."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.faults.meshes import OnMesh, tensor_parallel
from tests.distributed.models import VOCABULARY, Gradients, gradients_equal, gradients_of, runner_of
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.limits import Limit, RowLimit
from torchtune_adaptive.engine.memory import MemoryMeter
from torchtune_adaptive.engine.probes import TrainingStep, find_max_batch_size, profile_memory
from torchtune_adaptive.engine.results import StepResult

LENGTHS = [[16, 4, 8, 12, 16, 6], [4, 6, 8, 4, 16, 4]]
"""By data-parallel rank: under a limit by length, the first needs more microbatches."""
ROOM_BYTES = 150_000
"""Memory of the last rank, in addition to the model: enough for three or four rows of 16 tokens. Others have more."""
STRATEGIES = ("linear", "binary", "profile")
"""`profile` measures a limit by length."""
RANKS = {"tensor parallel": 2, "tensor parallel and sharded": 4}


def samples_here() -> list[Tensor]:
    data_rank = dist.get_rank() // 2
    generator = torch.Generator().manual_seed(data_rank)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in LENGTHS[data_rank]]


def train(limit: Limit | None, strategy: str = "") -> tuple[Limit, StepResult, Gradients]:
    """Collective: run a step under the given limit, or under the one that a search finds."""
    with MemoryMeter() as meter:
        (model,), forward_backward = OnMesh(tensor_parallel).parts()
        runner = runner_of(model, limit or 1, forward_backward)
        if limit is None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = TrainingStep(
                runner=runner,
                sample=torch.arange(16),
                cut=lambda sample, length: sample[:length],
                update=lambda _: optimizer.step(),
                optimizers=[optimizer],
            )
            limit = searched(step, strategy, meter)
            runner.use_limit(limit)
    result = runner.run(samples_here(), step=1)
    runner.close()
    return limit, result, gradients_of(model)


def searched(step: TrainingStep[Tensor], strategy: str, meter: MemoryMeter) -> Limit:
    is_tightest = dist.get_rank() == dist.get_world_size() - 1
    meter.cap_bytes = meter.live_bytes + ROOM_BYTES * (1 if is_tightest else 2)
    if strategy == "profile":
        return profile_memory(step, memory=meter).limit
    found = find_max_batch_size(step, memory=meter, strategy=strategy, round_to="none", max_rows=16)
    assert (found.out_of_memory_count > 0) == (strategy == "binary")
    return RowLimit(found.rows)


def compare() -> list[tuple[str, int, bool]]:
    """Collective: by strategy, return the limit, the microbatches, and whether samples and gradients are equal."""
    compared = []
    for strategy in STRATEGIES:
        limit, result, gradients = train(None, strategy)
        _, expected, expected_gradients = train(limit)
        samples_equal = (result.load, result.loss_sum) == (expected.load, expected.loss_sum)
        equal = samples_equal and gradients_equal(gradients, expected_gradients)
        compared.append((str(limit), result.microbatches, equal))
    return compared


@pytest.mark.parametrize("name", RANKS, ids=lambda name: name.replace(" ", "_"))
def test_step_after_a_search_has_the_samples_and_gradients_of_a_step_under_its_limit(name: str):
    first, *others = run_on_ranks(RANKS[name], compare, timeout_s=120)
    assert others == [first] * len(others), "ranks found different limits"
    assert all(1 < microbatches < len(LENGTHS[0]) and equal for _, microbatches, equal in first), first
