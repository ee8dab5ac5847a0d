"""What a search cannot restore ends it on all ranks, with one message."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.searched_model import Shape, Trained, search_within
from torchtune_adaptive.engine import snapshot
from torchtune_adaptive.engine.memory import MemoryMeter
from torchtune_adaptive.engine.results import StepResult
from torchtune_adaptive.errors import UnrecoverableError


def error_on_each_rank(case: str) -> str:
    """Collective: search on all ranks, with a condition on the last one that a search does not allow."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with MemoryMeter() as meter:
        trained = Trained(Shape(), torch.optim.Rprop if case == "full" else torch.optim.AdamW)

        def update(result: StepResult) -> None:
            trained.update(result)
            if is_last and case == "clamps":
                next(trained.model.parameters()).data.clamp_(-1e-3, 1e-3)

        if is_last and case == "full":
            snapshot.free_host_bytes = lambda: 1000
        try:
            search_within(replace(trained.step(), update=update), meter, 400_000)
        except UnrecoverableError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("case", "text"),
    [("full", "1000 B free"), ("clamps", "a search has changed the weights on rank 1"), ("usual", "")],
)
def test_search_that_cannot_restore_the_model_ends_on_all_ranks(case: str, text: str):
    first, second = run_on_ranks(2, error_on_each_rank, case)
    assert first == second
    assert text in first
    assert bool(text) == bool(first)
