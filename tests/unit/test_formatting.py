"""Amounts of memory in configs."""

import pytest

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.formatting import (
    parse_size,
    parse_sizes,
    size_for_rank,
)

GIB = 2**30
KEY = "adaptive.memory_limit"


@pytest.mark.parametrize(
    ("written", "expected_bytes"),
    [("24GiB", 24 * GIB), ("500MiB", 500 * 2**20), ("80GB", 80 * 10**9), ("1.5 GiB", 3 * GIB // 2),
     ("  2gib ", 2 * GIB), ("64KiB", 65536), ("700b", 700), (0.9, 90 * GIB), ("0.25", 25 * GIB),
     (1, 100 * GIB), ("120GiB", 100 * GIB)],
)  # fmt: skip
def test_every_allowed_form_is_parsed_up_to_the_devices_memory(written: object, expected_bytes: int) -> None:
    assert parse_size(written, KEY).bytes_of(100 * GIB) == expected_bytes


@pytest.mark.parametrize(
    "written",
    [24, 0, -0.5, 1.01, True, None, float("nan"), float("inf"), "nan", "", "GiB", "24G", "24 XiB", "-1GiB",
     "1,5GiB", "0GiB", "0.1b", "90%", {"a": 1}, "9" * 400 + "GiB", 10**400],
)  # fmt: skip
def test_other_forms_are_errors_with_key_value_and_allowed_forms(written: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(written, KEY)
    for part in (KEY, repr(written), "24GiB", "0.9"):
        assert part in str(caught.value)


def test_list_has_one_amount_for_each_rank() -> None:
    sizes = parse_sizes(["1GiB", "500MiB", 0.5], KEY)
    of_ranks = [size_for_rank(sizes, rank, 3, KEY).bytes_of(4 * GIB) for rank in range(3)]
    assert of_ranks == [GIB, 500 * 2**20, 2 * GIB]
    one = parse_sizes("1GiB", KEY)
    assert [size_for_rank(one, rank, 2, KEY).bytes_of(4 * GIB) for rank in range(2)] == [GIB, GIB]
    with pytest.raises(ConfigError, match="empty"):
        parse_sizes([], KEY)
    for rank, world_size in ((0, 4), (2, 4), (0, 1)):
        with pytest.raises(ConfigError, match=f"3 amounts for {world_size} ranks"):
            size_for_rank(sizes, rank, world_size, KEY)
