"""torchtune's offloading after a failed pass.

On a CPU: offloading's bookkeeping is plain Python, only its streams need a GPU.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torchtune.training import OffloadActivations

from torchtune_adaptive.tune.finetuning import clearing_offloaded_on_error


@pytest.fixture
def activations() -> OffloadActivations:
    with mock.patch("torch.cuda.default_stream", return_value=SimpleNamespace()):
        return OffloadActivations(use_pin_memory=False, use_streams=False, min_offload_size=1)


def forward(activations: OffloadActivations) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    with activations:
        model(torch.ones(4, 8))


def failing_pass(activations: OffloadActivations) -> None:
    with clearing_offloaded_on_error(activations):
        forward(activations)
        assert activations.tracker, "torchtune itself keeps what waits for a backward"
        raise torch.OutOfMemoryError("no room for the backward")


def test_failed_pass_leaves_no_offloaded_activations(activations: OffloadActivations) -> None:
    for _ in range(2):  # in the second, torchtune's assertion would find leftovers
        with pytest.raises(torch.OutOfMemoryError):
            failing_pass(activations)
        assert not activations.tracker
        assert activations.is_first_forward_call


def test_successful_pass_keeps_its_activations_for_its_backward(activations: OffloadActivations) -> None:
    with clearing_offloaded_on_error(activations):
        forward(activations)
    assert activations.tracker
