"""What a sample is taken to cost."""

from __future__ import annotations

import pytest
from torch import nn

from tests.unit.tune.models import build
from torchtune_adaptive.tune.cost import cost_of


def test_attention_makes_long_samples_cost_more_than_their_tokens() -> None:
    model = build()
    cost, parameters = cost_of(model), sum(each.numel() for each in model.layers[0].parameters())
    assert cost(1) == pytest.approx(1, rel=0.01)
    assert cost(100) == pytest.approx(100 * (1 + 100 * 32 / parameters))


def test_where_nobody_knows_what_attention_costs_a_sample_costs_its_tokens() -> None:
    strange = build()
    strange.layers[0].attn = nn.Linear(1, 1)
    assert cost_of(strange)(100) == cost_of(nn.Linear(1, 1))(100) == 100
