"""torchtune's offloading after a failed pass, and figures of preference training."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torchtune.rlhf.loss import DPOLoss
from torchtune.training import OffloadActivations

from torchtune_adaptive.data.samples import PAIR
from torchtune_adaptive.engine.plans import Load
from torchtune_adaptive.engine.results import StepResult
from torchtune_adaptive.objectives import preference
from torchtune_adaptive.objectives.finetuning import clearing_offloaded_on_error
from torchtune_adaptive.objectives.preference import (
    PAIRS,
    POLICY,
    REFERENCE,
    Passes,
    Scores,
    figures_of,
)


def forward(activations: OffloadActivations) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with activations:
        model(torch.ones(4, 8))


def failing_pass(activations: OffloadActivations) -> None:
    with clearing_offloaded_on_error(activations):
        forward(activations)
        assert activations.tracker, "torchtune itself keeps what waits for a backward"
        raise torch.OutOfMemoryError("no room for the backward")


def test_activations_stay_offloaded_for_a_backward_but_not_after_a_failed_pass() -> None:
    with mock.patch("torch.cuda.default_stream", return_value=SimpleNamespace()):
        activations = OffloadActivations(use_pin_memory=False, use_streams=False, min_offload_size=1)
    for _ in range(2):  # in the second, torchtune's assertion would find leftovers
        with pytest.raises(torch.OutOfMemoryError):
            failing_pass(activations)
        assert not activations.tracker
        assert activations.is_first_forward_call
    with clearing_offloaded_on_error(activations):
        forward(activations)
    assert activations.tracker


def test_figures_are_means_over_pairs_and_logits_over_tokens() -> None:
    of_pairs = {"rewards/chosen": 2.0, "rewards/rejected": 0.5, "rewards/accuracies": 0.75, "log_probs/rejected": -20.0}
    of_tokens = {"logits/chosen": 2.0, "logits/rejected": 4.0}
    sums = {"pairs": 12, "tokens/chosen": 25, "tokens/rejected": 25, "log_probs/chosen": -120.0}
    sums |= {name: 12 * mean for name, mean in of_pairs.items()} | {name: 25 * mean for name, mean in of_tokens.items()}
    result = StepResult(
        loss_sum=torch.tensor(6.0),
        target_tokens=60,
        microbatches=3,
        recoveries=0,
        load=Load(tokens=100, padded_tokens=120, most_rows=2, most_tokens=30, cost=120),
        sums={name: torch.tensor(float(value)) for name, value in sums.items()},
    )
    figures = figures_of({REFERENCE: replace(result, microbatches=2), POLICY: result})
    more = {"rewards/margins": 1.5, "reference_microbatches": 2}
    assert figures == pytest.approx(figures | of_pairs | of_tokens | more)


def test_pair_with_a_column_named_filler_is_trained_and_a_filler_is_not() -> None:
    pair = PAIR.uniform(3, 4)
    scores = Scores(torch.zeros(2, 2), torch.zeros(4, 4, 1), [4] * 4, 16)
    nothing: Any = mock.MagicMock(enable_activation_offloading=False)
    passes = Passes(nothing, nothing, DPOLoss(), nothing, nothing, torch.device("cpu"))
    with mock.patch.object(preference, "score", return_value=scores):
        loss, _, sums = passes._loss([{**pair, "filler": "of the dataset"}, PAIR.without_labels(pair)])
    assert sums[PAIRS] == 1
    assert loss.item() == pytest.approx(math.log(2))
