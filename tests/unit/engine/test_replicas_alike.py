"""What replicas compare: a number that is another for other weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.recipes.metering import profiled
from torchtune_adaptive.engine.ranks import checksum


def swapped(tensor: Tensor, one: int, other: int) -> Tensor:
    flat = tensor.flatten()
    flat[[one, other]] = flat[[other, one]]
    return flat.view_as(tensor)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one bit": lambda tensor: tensor + torch.eye(20, 30, dtype=tensor.dtype) * 2**-7,
    "two neighbours swapped": lambda tensor: swapped(tensor, 3, 4),
    "two rows swapped": lambda tensor: tensor[[1, 0, *range(2, 20)]],
    "the last two swapped": lambda tensor: swapped(tensor, 598, 599),
    "two a row of sums apart swapped": lambda tensor: swapped(tensor, 5, 5 + 251),
    "minus zero": lambda tensor: torch.where(tensor == tensor.max(), -0.0, tensor),
    "NaN": lambda tensor: torch.where(tensor == tensor.max(), torch.nan, tensor),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_have_anotherchecksum(change: str, dtype: torch.dtype) -> None:
    weights = torch.randn(20, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert checksum([weights]) == checksum([weights.clone()])
    assert checksum([weights]) != checksum([CHANGES[change](weights.clone())])


def test_a_checksum_takes_no_copy_of_the_weights() -> None:
    weights = torch.randn(4_000_000).to(torch.bfloat16)
    assert profiled(lambda: checksum([weights])).peak_bytes < 10 * 2**20


def test_the_order_of_parameters_counts_and_what_is_empty_does_not() -> None:
    one, other = torch.tensor([1.0]), torch.tensor([2.0])
    assert checksum([one, other]) != checksum([other, one])
    assert checksum([one, torch.zeros(0)]) == checksum([one])
