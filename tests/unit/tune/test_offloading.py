"""torchtune's offloading on a CPU: its bookkeeping is plain Python, only its streams need a GPU."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torchtune.training import OffloadActivations

from torchtune_adaptive.tune.offloading import leaving_nothing_offloaded


@pytest.fixture
def offloaded() -> OffloadActivations:
    with mock.patch("torch.cuda.default_stream", return_value=SimpleNamespace()):
        return OffloadActivations(use_pin_memory=False, use_streams=False, min_offload_size=1)


def forward_that_fails(model: nn.Module, offloaded: OffloadActivations) -> None:
    with offloaded:
        model(torch.ones(4, 8))
    raise torch.OutOfMemoryError("no room for the backward")


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def test_torchtune_itself_keeps_what_waits_for_a_backward(offloaded: OffloadActivations, model: nn.Module) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        forward_that_fails(model, offloaded)
    assert offloaded.tracker


def test_a_failed_pass_leaves_nothing_to_the_next_one(offloaded: OffloadActivations, model: nn.Module) -> None:
    run = leaving_nothing_offloaded(forward_that_fails, offloaded)
    for _ in range(2):  # the second would meet torchtune's assertion that nothing is left
        with pytest.raises(torch.OutOfMemoryError):
            run(model, offloaded)
        assert not offloaded.tracker
        assert offloaded.is_first_forward_call


def test_a_pass_that_succeeds_keeps_its_activations_for_its_backward(
    offloaded: OffloadActivations, model: nn.Module
) -> None:
    def forward() -> None:
        with offloaded:
            model(torch.ones(4, 8))

    leaving_nothing_offloaded(forward, offloaded)()
    assert offloaded.tracker
