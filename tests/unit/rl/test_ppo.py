"""PPO's advantages equal torchtune's, and sums of losses do not depend on the split."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from torchtune import rlhf, training

from tests.unit.rl.test_settings import DEMO, config
from torchtune_adaptive.rl.generation import lengths_of
from torchtune_adaptive.rl.ppo import VALUE_MODEL, TwoCheckpointers, add_advantages
from torchtune_adaptive.rl.rollouts import (
    ADVANTAGES,
    LOG_PROBS,
    REFERENCE_LOG_PROBS,
    RETURNS,
    SCORE,
    VALUES,
    Rollout,
    counts_of,
    results_of,
    valued_of,
)
from torchtune_adaptive.rl.settings import read_ppo_settings
from torchtune_adaptive.rl.stages import policy_loss

STOP = 9
ANSWERS = torch.tensor([[1, 2, 9, 3, 9], [9, 1, 1, 1, 1], [1, 2, 3, 4, 9], [1, 2, 3, 4, 5], [4, 9, 0, 0, 0]])


def drawn(seed: int) -> Tensor:
    return torch.randn(ANSWERS.shape, generator=torch.Generator().manual_seed(seed))


def rollouts(scores: Tensor, reference: Tensor) -> list[Rollout]:
    """Return rollouts of iteration 5 after all stages without a backward."""
    lengths = lengths_of(ANSWERS, [STOP])
    made = [
        Rollout(at, 5, torch.arange(3), answer, length)
        for at, (answer, length) in enumerate(zip(ANSWERS, lengths, strict=True))
    ]
    counts = counts_of(made)
    valued = valued_of(counts)
    results = {
        SCORE: scores,
        LOG_PROBS: drawn(0) * counts,
        REFERENCE_LOG_PROBS: reference * counts,
        VALUES: drawn(2) * valued,
    }
    for at, each in enumerate(made):
        each.results |= {name: of[at] for name, of in results.items()}
    return made


COUNT_MASK = counts_of(rollouts(torch.zeros(5), drawn(1)))


def as_torchtune() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return padding masks of answers and values, last tokens, and positions of rewards, as in torchtune's recipe."""
    padding, _ = rlhf.truncate_sequence_at_first_stop_token(ANSWERS.clone(), torch.tensor([STOP]), 0)
    last = training.get_unmasked_sequence_lengths(padding)
    at = torch.where((last > 0) & (last < ANSWERS.size(1) - 1), last + 1, last)
    return padding, padding.clone().scatter_(1, at[:, None], False), last, at


@pytest.mark.parametrize("whiten_rewards", [True, False])
@pytest.mark.parametrize(("no_stop", "shorter_than"), [(True, None), (False, 2), (True, 3), (False, None)])
def test_advantages_and_figures_equal_torchtunes(whiten_rewards: bool, no_stop: bool, shorter_than: int | None) -> None:
    padding, value_padding, last, at = as_torchtune()
    scores, log_probs, reference, values = torch.arange(5.0), drawn(0), drawn(1), drawn(2)
    everyone = rollouts(scores, reference)
    penalties = {"penalise_no_eos": no_stop, "min_response_length": shorter_than, "reward_penalty": -3.0}
    changes = {"whiten_rewards": whiten_rewards, "kl_coeff": 0.1, "gamma": 0.99, "lmbda": 0.95, **penalties}
    ppo = replace(read_ppo_settings(config(DEMO))[1], **changes)
    figures = add_advantages(everyone, ppo)

    if no_stop or shorter_than:
        scores[rlhf.get_reward_penalty_mask(padding, last, no_stop, shorter_than)] = -3.0
    log_probs[padding], reference[padding], values[value_padding] = 1.0, 1.0, 0.0
    rewards, kl, kl_rewards = rlhf.get_rewards_ppo(scores, log_probs, reference, 0.1, at)
    if whiten_rewards:
        rewards = rlhf.whiten(rewards, mask=~value_padding).masked_fill(value_padding, 0.0)
    advantages, returns = rlhf.estimate_advantages(values, rewards, 0.99, 0.95, masks=~padding)
    torch.testing.assert_close(results_of(everyone, ADVANTAGES), advantages)
    torch.testing.assert_close(results_of(everyone, RETURNS), returns)
    assert figures["scores"] == pytest.approx(scores.mean())
    assert figures["kl"] == pytest.approx(kl.sum(1).mean())
    assert figures["rlhf_reward"] == pytest.approx(scores.mean() + kl_rewards.sum(1).mean())
    assert (figures["num_stop_tokens"], figures["response_lengths"]) == (3, pytest.approx(last.float().mean()))


def loss_of(log_probs: Tensor, before: Tensor, advantages: Tensor, counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return policy_loss(log_probs, before, advantages, counts, 0.2)


def test_figures_are_sums_over_counted_tokens() -> None:
    tokens = float(COUNT_MASK.sum())
    for sign, clipped, loss in ((1, tokens, -1.2), (-1, 0, torch.e)):
        found, sums = loss_of(drawn(5) + 1, drawn(5), sign * torch.ones(ANSWERS.shape), COUNT_MASK)
        assert float(found) == pytest.approx(loss * tokens, rel=1e-5)
        assert float(sums["clipped"]) == clipped
        assert float(sums["ratios"]) == pytest.approx(tokens * torch.e, rel=1e-5)
        assert float(sums["squares"]) == pytest.approx(tokens, rel=1e-5)


def test_infinite_values_of_uncounted_tokens_have_no_effect() -> None:
    log_probs = torch.tensor([[0.0, torch.inf]], requires_grad=True)
    loss_of(log_probs, torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[True, False]]))[0].backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-1.0, 0.0]]


def test_files_of_an_earlier_value_model_are_replaced(tmp_path: Path) -> None:
    """A policy from a checkpoint of PPO: torchtune copies its folder `value`, too."""

    def writing(folder: Path, *names: str) -> mock.Mock:
        def save(_: object, *, epoch: int, **__: object) -> None:
            for name in names:
                file = folder / f"epoch_{epoch}" / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(str(folder.name))

        return mock.Mock(save_checkpoint=save)

    policy, value = writing(tmp_path, "config.json", "value/config.json"), writing(tmp_path / "value", "config.json")
    state = {training.MODEL_KEY: {}, VALUE_MODEL: {}}
    TwoCheckpointers(policy, value, tmp_path).save_checkpoint(state, epoch=1, intermediate_checkpoint=True)
    assert (tmp_path / "epoch_1" / "value" / "config.json").read_text() == "value"
