"""GRPO's arithmetic, compared with published formulas."""

import pytest
import torch
from torch import Tensor

from torchtune_adaptive.rl.grpo import add_advantages, advantages_of
from torchtune_adaptive.rl.microbatches import policy_loss
from torchtune_adaptive.rl.rollouts import (
    ADVANTAGES,
    SCORE,
    WEIGHT,
    Rollout,
    counts_of,
    fraction_cut_off,
    results_of,
)
from torchtune_adaptive.rl.settings import GRPOLoss, GRPOSettings

MOST = 7
SIZES = {"num_steps": 1, "batch_size": 2, "grpo_samples": 3, "forward_batch_size": 1, "max_generated_tokens": MOST}


def answers(rewards: list[float], lengths: list[int]) -> list[Rollout]:
    """Return answers with these rewards and lengths."""
    made = []
    for number, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        results = {SCORE: torch.tensor(float(reward))}
        made.append(Rollout(number, 1, torch.ones(2).long(), torch.ones(MOST).long(), length, results))
    return made


def expected(
    average: str, log_probs: Tensor, before: Tensor, reference: Tensor, advantages: Tensor, mask: Tensor, beta: float
) -> Tensor:
    """TRL's formulas named grpo, dapo and dr_grpo; torchtune's mean over tokens is dapo."""
    ratio = torch.exp(log_probs - before)
    surrogate = -torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.28) * advantages)
    kl = torch.exp(reference - log_probs) - (reference - log_probs) - 1
    losses = (surrogate + beta * kl) * mask
    if average == "answers":
        return (losses.sum(-1) / mask.sum(-1)).mean()
    return losses.sum() / (mask.sum() if average == "tokens" else len(mask) * MOST)


@pytest.mark.parametrize("average", ["tokens", "answers", "length"])
def test_loss_of_any_split_equals_the_formulas(average: str) -> None:
    draw = torch.Generator().manual_seed(0)
    loss = GRPOLoss(epsilon=0.2, epsilon_high=0.28, kl_coeff=0.05, average=average)
    everyone = answers([1, 0, 0.5, 2, 2, 7], [3, 7, 1, 2, 5, 4])
    divisor, _ = add_advantages(everyone, GRPOSettings(**SIZES, loss=loss))
    before, reference, log_probs = (torch.randn(6, MOST, generator=draw, dtype=torch.float64) / 3 for _ in range(3))
    log_probs.requires_grad_()
    advantages, counts = results_of(everyone, ADVANTAGES).double(), counts_of(everyone)
    truth = expected(average, log_probs, before, reference, advantages, counts, 0.05)
    (wanted,) = torch.autograd.grad(truth, log_probs)
    tensors = log_probs, before, reference, advantages, counts, results_of(everyone, WEIGHT).double()

    def weighted(ours: Tensor, then: Tensor, theirs: Tensor, *rest: Tensor) -> Tensor:
        return policy_loss(ours, then, *rest, loss.clip, theirs, loss.kl_coeff)[0]

    for split in ([6], [1, 5], [2, 2, 2], [1] * 6):
        microbatches = zip(*(tensor.split(split) for tensor in tensors), strict=True)
        parts = [weighted(*microbatch) for microbatch in microbatches]
        total = torch.stack(parts).sum() / divisor
        (gradient,) = torch.autograd.grad(total, log_probs)
        torch.testing.assert_close(total, truth, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-9)


def test_advantages_are_normalized_by_mean_and_deviation_of_the_group() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    first = (rewards[0] - 1.0) / (rewards[0].std() + 1e-4)
    assert torch.allclose(advantages_of(rewards, scaled=True), torch.stack([first, torch.zeros(4)]))
    assert advantages_of(rewards, scaled=False).tolist() == [[0, -1, -1, 2], [0, 0, 0, 0]]


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("reward", "size"), [(0.1, 8), (1000.1, 6)])
def test_advantages_of_equal_rewards_are_zero(reward: float, size: int, scaled: bool) -> None:
    assert advantages_of(torch.full((1, size), reward), scaled=scaled).tolist() == [[0.0] * size]


def test_groups_with_equal_rewards_are_counted_and_stay_in_the_mean() -> None:
    divisor, figures = add_advantages(answers([1, 0, 0, 0.1, 0.1, 0.1], [3, 7, 1, 2, 5, 4]), GRPOSettings(**SIZES))
    assert divisor == 22
    assert figures["groups_without_signal"] == 1


def test_answer_that_stops_at_its_last_token_is_not_cut_off() -> None:
    everyone = answers([1, 0, 0], [3, MOST, MOST])
    everyone[2].answer[-1] = 5
    assert fraction_cut_off(everyone, [5, 6]) == pytest.approx(1 / 3)
    assert fraction_cut_off(everyone, []) == pytest.approx(2 / 3)
