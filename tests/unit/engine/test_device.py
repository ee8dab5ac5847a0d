import torch

from torchtune_adaptive.engine.memory import RngState


def test_random_numbers_repeat_after_restoring():
    state = RngState.capture()
    first = torch.rand(8)
    state.restore()
    assert torch.equal(torch.rand(8), first)
