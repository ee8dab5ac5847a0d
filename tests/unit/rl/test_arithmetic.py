"""PPO's arithmetic: torchtune's figures where it has them, and sums that no split changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchtune import rlhf, training
from torchtune.rlhf.loss import PPOLoss

from torchtune_adaptive.rl.arithmetic import (
    Answered,
    estimates_of,
    penalised,
    policy_sums,
    rewards_of,
    value_sum,
    where_answers_end,
    whitened,
)

STOP = 9
ANSWERS = torch.tensor([[1, 2, 9, 3, 9], [9, 1, 1, 1, 1], [1, 2, 3, 4, 9], [1, 2, 3, 4, 5], [4, 9, 0, 0, 0]])
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def drawn(seed: int) -> Tensor:
    return torch.randn(ANSWERS.shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def ends() -> Answered:
    return where_answers_end(ANSWERS, [STOP])


def as_torchtune() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Masks of padding in answers and in values, the last tokens, and where rewards belong, as its recipe has them."""
    padding, _ = rlhf.truncate_sequence_at_first_stop_token(ANSWERS.clone(), torch.tensor([STOP]), 0)
    last = training.get_unmasked_sequence_lengths(padding)
    at = torch.where((last > 0) & (last < ANSWERS.size(1) - 1), last + 1, last)
    return padding, padding.clone().scatter_(1, at[:, None], False), last, at


def test_answers_end_where_torchtune_ends_them(ends: Answered) -> None:
    padding, value_padding, last, _ = as_torchtune()
    assert torch.equal(ends.counts, ~padding)
    assert torch.equal(ends.valued, ~value_padding)
    assert torch.equal(ends.last, last)


def test_without_stop_tokens_an_answer_ends_with_its_last_token() -> None:
    assert where_answers_end(ANSWERS, []).last.tolist() == [4] * 5


@pytest.mark.parametrize(("no_stop", "shorter_than"), [(True, None), (False, 2), (True, 3), (False, None)])
def test_scores_are_penalised_as_in_torchtune(ends: Answered, no_stop: bool, shorter_than: int | None) -> None:
    padding, _, last, _ = as_torchtune()
    expected = torch.arange(5.0)
    if no_stop or shorter_than:
        expected[rlhf.get_reward_penalty_mask(padding, last, no_stop, shorter_than)] = -3.0
    assert torch.equal(
        penalised(torch.arange(5.0), ends, no_stop=no_stop, shorter_than=shorter_than, penalty=-3.0), expected
    )


def test_rewards_and_estimates_are_those_of_torchtune(ends: Answered) -> None:
    padding, value_padding, _, at = as_torchtune()
    scores, log_probs, reference, values = torch.arange(5.0), drawn(0), drawn(1), drawn(2)
    found = rewards_of(scores, log_probs, reference, ends, 0.1)
    log_probs[padding], reference[padding], values[value_padding] = 1.0, 1.0, 0.0
    for ours, expected in zip(found, rlhf.get_rewards_ppo(scores, log_probs, reference, 0.1, at), strict=True):
        torch.testing.assert_close(ours, expected)
    expected = rlhf.estimate_advantages(values, found.total, 0.99, 0.95, masks=~padding)
    ours = estimates_of(drawn(2), found.total, ends, 0.99, 0.95)
    torch.testing.assert_close(ours.advantages, expected[0], **CLOSE)
    torch.testing.assert_close(ours.returns, expected[1], **CLOSE)


def test_one_value_alone_is_not_whitened() -> None:
    mask = torch.tensor([[True, False]])
    assert whitened(torch.tensor([[3.0, 7.0]]), mask)[0, 0] == 3.0


def losses_by(rows: int, ends: Answered) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both losses and their gradients, from parts of so many rows."""
    log_probs, values = drawn(3).requires_grad_(), drawn(4).requires_grad_()
    of_policy, of_value = torch.zeros(()), torch.zeros(())
    for start in range(0, len(ANSWERS), rows):
        part = slice(start, start + rows)
        of_policy = (
            of_policy + policy_sums(log_probs[part], drawn(5)[part], drawn(6)[part], ends.counts[part], 0.2).loss
        )
        of_value = of_value + value_sum(values[part], drawn(7)[part], drawn(8)[part], ends.valued[part], 0.2)
    (of_policy + of_value).backward()
    assert log_probs.grad is not None
    assert values.grad is not None
    return of_policy.detach(), of_value.detach(), log_probs.grad, values.grad


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_sums_over_any_split_are_torchtunes_means_times_their_tokens(ends: Answered, rows: int) -> None:
    policy, value, of_log_probs, of_values = losses_by(rows, ends)
    log_probs, values = drawn(3).requires_grad_(), drawn(4).requires_grad_()
    loss, policy_loss, value_loss, _, _ = PPOLoss(epsilon=0.2, value_clip_range=0.2, value_coeff=1.0)(
        drawn(5), log_probs, drawn(6), drawn(7), values, drawn(8), ends.counts, ends.valued
    )
    loss.backward()
    tokens, valued = ends.counts.sum(), ends.valued.sum()
    torch.testing.assert_close(policy / tokens, policy_loss)
    torch.testing.assert_close(value / valued, value_loss)
    torch.testing.assert_close(of_log_probs / tokens, log_probs.grad)
    torch.testing.assert_close(of_values / valued, values.grad)


def test_figures_are_sums_over_tokens_that_count(ends: Answered) -> None:
    tokens = float(ends.counts.sum())
    better = policy_sums(drawn(5) + 1, drawn(5), torch.ones(ANSWERS.shape), ends.counts, 0.2)
    worse = policy_sums(drawn(5) + 1, drawn(5), -torch.ones(ANSWERS.shape), ends.counts, 0.2)
    assert float(better.ratios) == pytest.approx(tokens * torch.e, rel=1e-5)
    assert float(better.squares) == pytest.approx(tokens, rel=1e-5)
    assert (float(better.clipped), float(worse.clipped)) == (tokens, 0)
    assert float(better.loss) == pytest.approx(-1.2 * tokens, rel=1e-5)
    assert float(worse.loss) == pytest.approx(torch.e * tokens, rel=1e-5)


def test_what_is_infinite_where_nothing_counts_changes_nothing() -> None:
    log_probs = torch.tensor([[0.0, torch.inf]], requires_grad=True)
    sums = policy_sums(log_probs, torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[True, False]]), 0.2)
    sums.loss.backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-1.0, 0.0]]
