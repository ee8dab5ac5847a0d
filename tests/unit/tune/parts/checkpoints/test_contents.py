"""Weights that are NaN are not worth a checkpoint."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run_on_ranks
from torchtune_adaptive.tune.parts.checkpoints.contents import weights_are_finite


def verdicts(bad: float) -> list[bool]:
    model = nn.Linear(2, 2)
    frozen = nn.Parameter(torch.full((1,), bad), requires_grad=False)
    model.register_parameter("frozen", frozen)
    found = [weights_are_finite(model)]
    if dist.get_rank() == 1:
        model.weight.data[0, 0] = bad
    return [*found, weights_are_finite(model)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_rank_with_a_weight_that_is_not_finite_is_enough(bad: float) -> None:
    assert run_on_ranks(2, verdicts, bad, timeout_s=60) == [[True, False]] * 2
