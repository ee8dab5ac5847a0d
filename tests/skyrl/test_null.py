"""Searches in full size, and weights that leave the device between passes, on a null device."""

from __future__ import annotations

import pytest

pytest.importorskip("skyrl")

from tests.null.processes import skip_without_null_device
from tests.skyrl.full_size import on_null_device


@pytest.mark.parametrize("kind", ["policy", "critic", "reference"])
def test_largest_microbatch_of_the_longest_rows_fits_and_offloaded_weights_return(kind: str) -> None:
    skip_without_null_device()
    found = on_null_device(kind)
    loaded, offloaded, returned = found["in_memory"]
    assert offloaded < 0.05 * loaded
    assert returned == pytest.approx(loaded, rel=0.05)
    assert found["rows"]["forward"] == 32  # all rows of the batch
    assert found["retries"] == 0
    assert found["recoveries"] == 1
