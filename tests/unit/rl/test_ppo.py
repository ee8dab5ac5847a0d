"""Figures of PPO's losses; the runs of the recipe are compared with torchtune's."""

import pytest
import torch

from torchtune_adaptive.rl.microbatches import policy_loss

COUNT_MASK = torch.arange(5) < torch.tensor([3, 1, 5, 5, 2])[:, None]
BEFORE = torch.randn(COUNT_MASK.shape, generator=torch.Generator().manual_seed(5))


def test_figures_are_sums_over_counted_tokens() -> None:
    tokens = float(COUNT_MASK.sum())
    for sign, clipped, loss in ((1, tokens, -1.2), (-1, 0, torch.e)):
        found, sums = policy_loss(BEFORE + 1, BEFORE, sign * torch.ones(BEFORE.shape), COUNT_MASK, 0.2)
        assert float(found) == pytest.approx(loss * tokens, rel=1e-5)
        assert float(sums["clipped"]) == clipped
        assert float(sums["ratios"]) == pytest.approx(tokens * torch.e, rel=1e-5)
        assert float(sums["squares"]) == pytest.approx(tokens, rel=1e-5)


def test_infinite_values_of_uncounted_tokens_have_no_effect() -> None:
    log_probs = torch.tensor([[0.0, torch.inf]], requires_grad=True)
    loss, _ = policy_loss(log_probs, torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[True, False]]), 0.2)
    loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-1.0, 0.0]]
