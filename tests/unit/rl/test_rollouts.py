"""Random numbers of answers, rollouts cut to measured lengths, fillers, log-probabilities of answers, and figures of
losses. The runs of the recipe are compared with torchtune's.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torchtune.models.llama3_2 import llama3_2

from tests.unit.rl.test_settings import DEMO, config
from tests.unit.tune.minimal_config import NEEDED
from tests.unit.tune.models import SIZES
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.rl.generation import choose, draws
from torchtune_adaptive.rl.microbatches import AnswerScorer, policy_loss
from torchtune_adaptive.rl.ppo import add_advantages
from torchtune_adaptive.rl.rollouts import (
    LOG_PROBS,
    REFERENCE_LOG_PROBS,
    RETURNS,
    SCORE,
    VALUES,
    Rollout,
    answer_tokens,
    build_prompts,
    counts_of,
    results_of,
    sequences_of,
    valued_of,
    worst_rollout,
)
from torchtune_adaptive.rl.settings import read_ppo_settings

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


PROMPT, NEW = 16, 12
WORST = worst_rollout(torch.arange(PROMPT), NEW)


def test_rollout_is_cut_to_the_measured_length_with_the_longest_answer() -> None:
    for length in range(2, PROMPT + NEW + 1):
        cut = WORST.shortened(length)
        assert cut.whole_length == length
        assert cut.length == min(NEW, length - 1)
        assert counts_of([cut]).sum() == cut.length
        assert sequences_of([cut], "cpu").tokens.shape == (1, length)
    for length in range(NEW + 1, PROMPT + NEW + 1):
        generates = WORST.with_shorter_prompt(length)
        assert (generates.padded_length, len(generates.answer)) == (length, NEW)
    assert (WORST.whole_length, WORST.padded_length) == (PROMPT + NEW, PROMPT + NEW)
    assert counts_of([WORST]).all()


def test_filler_tokens_do_not_count() -> None:
    filler = WORST.filler()
    filler.length = 7  # as after generation
    assert not counts_of([filler]).any()
    assert answer_tokens([WORST, filler]) == NEW


MESH: Any = {"dp": SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)}


def samples_of(tokenizer: Any) -> list[Any]:
    """Component of a dataset."""
    return [{"tokens": tokens, "labels": tokens} for tokens in ([1, 2], [3])]


def test_prompts_are_truncated_to_the_length_of_the_tokenizer() -> None:
    cfg = OmegaConf.create({"dataset": {"_component_": f"{__name__}.samples_of"}})
    dataset: Any = build_prompts(Settings(**NEEDED, config=cfg), SimpleNamespace(max_seq_len=1), MESH).dataset
    assert [dataset[index]["tokens"] for index in range(2)] == [[1], [3]]


WIDTH = 6
"""Number of generated tokens; answers end sooner."""


def test_only_answer_tokens_get_logits() -> None:
    model, seen = llama3_2(**SIZES), list[tuple[int, ...]]()
    model.norm.register_forward_hook(lambda _, __, states: seen.append(tuple(states.shape)))
    lengths = {2: 5, 9: 1, 5: 3}  # of answers, by those of prompts
    rollouts = [Rollout(0, 0, torch.arange(each), torch.arange(WIDTH), length=lengths[each]) for each in lengths]
    found = AnswerScorer(device=torch.device("cpu"), temperature=0.7).log_probs(model, rollouts)
    assert seen == [(3, 5, SIZES["embed_dim"])], "three answers, padded to the longest"
    assert [row.count_nonzero() for row in found] == [*lengths.values()]
    model(rollouts[0].tokens[None])
    assert seen[1:] == [(1, 2 + 5, SIZES["embed_dim"])], "afterwards, all tokens"


COUNTED = torch.arange(5) < torch.tensor([3, 1, 5, 5, 2])[:, None]


def test_figures_are_sums_over_counted_tokens() -> None:
    before, tokens = torch.randn(COUNTED.shape), float(COUNTED.sum())
    for sign, clipped, loss in ((1, tokens, -1.2), (-1, 0, torch.e)):
        found, sums = policy_loss(before + 1, before, sign * torch.ones(COUNTED.shape), COUNTED, 0.2)
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


def returns_of(whiten_rewards: bool) -> Tensor:
    """Return the rewards of answers with 3, 1, 5, 5 and 2 tokens: without a discount, they are the returns."""
    made = [Rollout(at, 0, torch.arange(3), torch.arange(5), length) for at, length in enumerate((3, 1, 5, 5, 2))]
    generator, valued = torch.Generator().manual_seed(0), valued_of(counts_of(made))
    for each, counted, has_value in zip(made, counts_of(made), valued, strict=True):
        drawn = torch.randn(4, 5, generator=generator)
        each.results |= {SCORE: drawn[0, 0], VALUES: drawn[1] * has_value}
        each.results |= {LOG_PROBS: drawn[2] * counted, REFERENCE_LOG_PROBS: drawn[3] * counted}
    _, ppo = read_ppo_settings(config(DEMO))
    add_advantages(made, replace(ppo, whiten_rewards=whiten_rewards, gamma=0.0, lmbda=0.0, kl_coeff=0.1))
    return results_of(made, RETURNS)[valued]


def test_rewards_are_whitened_over_all_positions_with_a_value() -> None:
    """torchtune's recipe ignores `whiten_rewards`, so runs cannot be compared."""
    plain, whitened = returns_of(False), returns_of(True)
    torch.testing.assert_close(whitened, (plain - plain.mean()) / plain.std() + plain.mean())
