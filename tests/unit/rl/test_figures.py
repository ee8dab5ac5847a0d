"""Figures of PPO's updates."""

from __future__ import annotations

import math

import torch
from torchtune.rlhf.loss import PPOLoss

from torchtune_adaptive.engine.reports import Load, StepResult
from torchtune_adaptive.rl.figures import Updates
from torchtune_adaptive.rl.ppo import figures_of_update


def result(loss_sum: float, tokens: int) -> StepResult:
    sums = {name: torch.tensor(float(tokens)) for name in ("clipped", "ratios", "squares")}
    load = Load(tokens=tokens, padded_tokens=tokens, most_rows=1, most_tokens=tokens, cost=1.0)
    return StepResult(
        loss_sum=torch.tensor(loss_sum), target_tokens=tokens, microbatches=1, recoveries=0, load=load, sums=sums
    )


def test_an_iteration_has_the_means_of_its_updates_and_skipped_updates_add_up_over_the_run() -> None:
    updates, loss = Updates(), PPOLoss(value_coeff=0.5)
    updates.add(figures_of_update(result(8.0, 4), result(3.0, 3), loss), 1.0)
    updates.add(figures_of_update(result(4.0, 4), result(6.0, 3), loss), 3.0)
    figures = updates.means()
    assert (figures["value_loss"], figures["policy_loss"], figures["loss"]) == (1.5, 1.5, 2.25)
    assert (figures["grad_norm"], figures["clipfrac"], figures["approx_policy_kl"]) == (2.0, 1.0, 0.5)
    assert figures["skipped_updates"] == 0
    for grad_norm in (math.nan, math.inf, 1.0):
        updates.add(figures_of_update(result(1.0, 1), result(1.0, 1), loss), grad_norm)
    assert updates.means()["skipped_updates"] == 2
    updates.add(figures_of_update(result(1.0, 1), result(1.0, 1), loss), 1.0)
    again = updates.means()
    assert (again["loss"], again["grad_norm"], again["skipped_updates"]) == (1.5, 1.0, 2)
