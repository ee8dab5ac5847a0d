"""Unpadded samples on a GPU: the kernel compared with padded rows, their memory, and their speed."""

from time import perf_counter

import pytest
import torch

from tests.gpu.real_steps import use
from tests.ranks import on_ranks
from tests.unit.data.models import build, furthest, padded, samples, totals_and_gradients, unpadded
from torchtune_adaptive.engine.limits import fit_surface

CLOSE = 3e-2
SIZES = {"embed_dim": 1024, "intermediate_dim": 2048, "num_heads": 8, "num_layers": 8, "max_seq_len": 4096}
SEEN = [(1, 4096), (4, 2048), (512, 16), (64, 128)]
HELD_OUT = [(3, 4096), (256, 64)]
"""Numbers of samples and their tokens."""
MIXED = tuple(range(16, 2048, 96)) + (16,) * 43
"""Padding to the longest sample would more than triple the tokens."""


def model_on(device: str) -> torch.nn.Module:
    return build(**SIZES).to(use(device), torch.bfloat16)


@pytest.mark.real_gpu
@on_ranks(1, timeout_s=120)
def test_losses_and_gradients_are_those_of_padded_rows(cuda: str) -> None:
    model, device = model_on(cuda), torch.device(cuda)
    batch = samples((1, 7, 33, 2, 19, 64, 5, 1, 40))
    expected, gradients = totals_and_gradients(model, padded, batch, device=device)
    totals, ours = totals_and_gradients(model, unpadded, batch, device=device)
    assert totals.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=CLOSE)
    assert furthest(ours, gradients) < CLOSE
    assert totals.target_tokens == expected.target_tokens


@on_ranks(1, timeout_s=120)
def test_memory_of_a_microbatch_is_a_surface_over_samples_and_tokens(cuda: str) -> None:
    model, measured = model_on(cuda), {}
    for rows, tokens in SEEN + HELD_OUT:
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        totals_and_gradients(model, unpadded, samples((tokens,) * rows), device=torch.device(cuda))
        measured[rows, tokens] = torch.cuda.max_memory_allocated()
    surface = fit_surface({at: measured[at] for at in SEEN})
    for at in HELD_OUT:
        assert surface.bytes_at(*at) == pytest.approx(measured[at], rel=0.02), at


@pytest.mark.real_gpu
@on_ranks(1, timeout_s=120)
def test_unpadded_samples_take_less_time(cuda: str) -> None:
    """Compare the shortest of five passes."""
    model, batch, best = model_on(cuda), samples(MIXED), []
    for collate in (unpadded, padded):
        times = []
        for _ in range(6):
            began = perf_counter()
            totals_and_gradients(model, collate, batch, device=torch.device(cuda))
            torch.cuda.synchronize()
            times.append(perf_counter() - began)
        best.append(min(times[1:]))
    joined, rows = best
    print(f"{rows / joined:.2f} times as fast")
    assert rows > 1.5 * joined
