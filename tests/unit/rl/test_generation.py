"""Random numbers per answer."""

import pytest
import torch

from torchtune_adaptive.rl.generation import choose, draws

SAMPLES = [(0, "generate", sample) for sample in range(8)]


def test_random_numbers_depend_only_on_the_key_and_are_prefixes() -> None:
    together = draws(SAMPLES[::-1], 100)
    for sample, drawn in zip(SAMPLES[::-1], together, strict=True):
        assert torch.equal(draws([sample], 5)[0], drawn[:5])
    assert len(together.unique(dim=0)) == len(SAMPLES)
    assert (draws([], 4).shape, draws(SAMPLES, 0).shape) == ((0, 4), (8, 0))


def test_choices_follow_their_probabilities() -> None:
    weights = torch.tensor([1.0, 0.0, 3.0, 6.0, 0.0])
    chosen = choose(weights.expand(20_000, -1), draws([(each,) for each in range(20_000)], 1)[:, 0])
    assert torch.bincount(chosen, minlength=5) == pytest.approx([2000, 0, 6000, 12_000, 0], rel=0.06)


@pytest.mark.parametrize("drawn", [0.0, 0.5, 1 - 2**-53, 1.0])
def test_zero_probability_is_never_chosen(drawn: float) -> None:
    """Not even at either end of the range, or if the number was rounded up."""
    weights = torch.tensor([[0.0, 1e-30, 0.0, 0.3, 0.0]])
    assert weights[0, choose(weights, torch.tensor([drawn], dtype=torch.float64))] > 0
