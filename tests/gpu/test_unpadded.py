"""Unpadded samples on a GPU: the kernel compared with padded rows, their memory, and their speed."""

from time import perf_counter

import pytest
import torch

from tests.gpu.real_steps import use
from tests.ranks import run_on_ranks
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


def compare(device: str) -> tuple[float, float, int]:
    """Return differences to padded rows: of loss, gradients and target tokens."""
    model, where = model_on(device), torch.device(device)
    batch = samples((1, 7, 33, 2, 19, 64, 5, 1, 40))
    expected, gradients = totals_and_gradients(model, padded, batch, device=where)
    totals, ours = totals_and_gradients(model, unpadded, batch, device=where)
    loss = abs(totals.loss_sum.item() / expected.loss_sum.item() - 1)
    return loss, furthest(ours, gradients), totals.target_tokens - expected.target_tokens


@pytest.mark.real_gpu
def test_losses_and_gradients_are_those_of_padded_rows(cuda: str) -> None:
    ((loss, gradients, tokens),) = run_on_ranks(1, compare, cuda, timeout_s=120)
    assert loss < CLOSE
    assert gradients < CLOSE
    assert tokens == 0


def peaks(device: str) -> dict[tuple[int, int], int]:
    model, found = model_on(device), {}
    for rows, tokens in SEEN + HELD_OUT:
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        totals_and_gradients(model, unpadded, samples((tokens,) * rows), device=torch.device(device))
        found[rows, tokens] = torch.cuda.max_memory_allocated()
    return found


def test_memory_of_a_microbatch_is_a_surface_over_samples_and_tokens(cuda: str) -> None:
    (measured,) = run_on_ranks(1, peaks, cuda, timeout_s=120)
    surface = fit_surface({at: measured[at] for at in SEEN})
    for at in HELD_OUT:
        assert surface.bytes_at(*at) == pytest.approx(measured[at], rel=0.02), at


def seconds_of_both(device: str) -> tuple[float, float]:
    """Return the shortest of five passes, without padding and with it."""
    model, batch, best = model_on(device), samples(MIXED), []
    for collate in (unpadded, padded):
        times = []
        for _ in range(6):
            began = perf_counter()
            totals_and_gradients(model, collate, batch, device=torch.device(device))
            torch.cuda.synchronize()
            times.append(perf_counter() - began)
        best.append(min(times[1:]))
    return best[0], best[1]


@pytest.mark.real_gpu
def test_unpadded_samples_take_less_time(cuda: str) -> None:
    ((joined, rows),) = run_on_ranks(1, seconds_of_both, cuda, timeout_s=120)
    print(f"{rows / joined:.2f} times as fast")
    assert rows > 1.5 * joined
