import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.demo.model import demo_model
from torchtune_adaptive.rl.generation import Sampling, choose, draws, generate

SAMPLES = list(range(8))


@given(st.permutations(SAMPLES), st.integers(1, 8))
def test_what_a_sample_draws_does_not_depend_on_its_microbatch(order: list[int], rows: int) -> None:
    alone = {sample: draws(3, 7, [sample], 5)[0] for sample in SAMPLES}
    for start in range(0, len(order), rows):
        microbatch = order[start : start + rows]
        for sample, drawn in zip(microbatch, draws(3, 7, microbatch, 5), strict=True):
            assert torch.equal(drawn, alone[sample])


def test_more_of_them_begin_with_the_same() -> None:
    assert torch.equal(draws(3, 7, SAMPLES, 100)[:, :5], draws(3, 7, SAMPLES, 5))


def test_nothing_else_draws_the_same() -> None:
    keys = [(seed, step, stage) for seed in (0, 1) for step in (0, 1, 11) for stage in ("", "generate")]
    drawn = torch.cat([draws(seed, step, [0, 1, 11], 4, stage=stage) for seed, step, stage in keys])
    assert len(drawn.unique(dim=0)) == len(drawn) == 36


def test_they_are_uniform() -> None:
    drawn = draws(0, 0, range(2000), 10).flatten()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert torch.histc(drawn, 10, 0, 1) == pytest.approx([2000] * 10, rel=0.1)


def test_no_other_generator_notices() -> None:
    before = torch.get_rng_state(), random.getstate()
    choose(torch.ones(2, 3), draws(0, 0, [4, 5], 1)[:, 0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_no_samples_and_no_numbers_are_none() -> None:
    assert draws(0, 0, [], 4).shape == (0, 4)
    assert draws(0, 0, [1, 2], 0).shape == (2, 0)


def test_choices_are_as_frequent_as_they_are_probable() -> None:
    weights = torch.tensor([1.0, 0.0, 3.0, 6.0, 0.0])
    chosen = choose(weights.expand(20_000, -1), draws(5, 0, range(20_000), 1)[:, 0])
    assert torch.bincount(chosen, minlength=5) == pytest.approx([2000, 0, 6000, 12_000, 0], rel=0.06)


@pytest.mark.parametrize("drawn", [0.0, 0.5, 1 - 2**-53, 1.0])
def test_what_has_no_probability_is_never_chosen(drawn: float) -> None:
    """Not at either end, where the number is as small or as large as it can be, or was rounded up."""
    weights = torch.tensor([[0.0, 1e-30, 0.0, 0.3, 0.0]])
    assert weights[0, choose(weights, torch.tensor([drawn], dtype=torch.float64))] > 0


def test_a_choice_does_not_depend_on_the_other_rows() -> None:
    weights = torch.rand(8, 50, generator=torch.Generator().manual_seed(0))
    drawn = draws(1, 2, SAMPLES, 1)[:, 0]
    alone = [choose(weights[row : row + 1], drawn[row : row + 1])[0] for row in SAMPLES]
    assert choose(weights, drawn).tolist() == [int(each) for each in alone]


def test_answers_to_one_prompt_are_those_that_each_gets_alone_and_the_prompt_runs_once() -> None:
    torch.manual_seed(0)
    model, rows = demo_model(num_layers=2, embed_dim=32, intermediate_dim=64, max_seq_len=64), []
    model.register_forward_pre_hook(lambda _, given: rows.append(tuple(given[0].shape)))
    one, other = torch.tensor([5, 6, 7]), torch.tensor([8])
    prompts, drawn = [one, other, one, one, other], draws(0, 0, range(5), 6)

    def answers(*groups: int | None) -> torch.Tensor:
        places = {"device": torch.device("cpu"), "dtype": torch.float32, "groups": groups}
        return generate(model, prompts, drawn, Sampling(), **places)

    shared = answers(0, 4, 0, 0, None)
    assert rows == [(3, 3), *[(5, 1)] * 5]
    assert torch.equal(shared, answers())
