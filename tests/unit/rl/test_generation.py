"""Random numbers per answer, and groups whose prompt runs once."""

import pytest
import torch

from torchtune_adaptive.demo.model import demo_model
from torchtune_adaptive.rl.generation import Sampling, choose, draws, generate

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


def test_answers_of_a_group_equal_separate_answers_and_the_prompt_runs_once() -> None:
    torch.manual_seed(0)
    model, rows = demo_model(num_layers=2, embed_dim=32, intermediate_dim=64, max_seq_len=64), []
    model.register_forward_pre_hook(lambda _, given: rows.append(tuple(given[0].shape)))
    one, other = torch.tensor([5, 6, 7]), torch.tensor([8])
    prompts, drawn = [one, other, one, one, other], draws(SAMPLES[:5], 6)

    def answers(*groups: int | None) -> torch.Tensor:
        places = {"device": torch.device("cpu"), "dtype": torch.float32, "groups": groups}
        return generate(model, prompts, drawn, Sampling(), **places)

    shared = answers(0, 4, 0, 0, None)
    assert rows == [(3, 3), *[(5, 1)] * 5]
    assert torch.equal(shared, answers())
