"""Amounts, counts and names in messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.errors import ConfigError, check_choice
from torchtune_adaptive.formatting import (
    LONGEST_SHOWN,
    count_of,
    did_you_mean,
    format_apart,
    format_bytes,
    in_columns,
    parse_size,
    parse_sizes,
    shown,
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


def test_list_gives_one_amount_per_rank() -> None:
    sizes = parse_sizes(["1GiB", "500MiB", 0.5], KEY)
    of_ranks = [size_for_rank(sizes, rank, 3, KEY).bytes_of(4 * GIB) for rank in range(3)]
    assert of_ranks == [GIB, 500 * 2**20, 2 * GIB]
    one = parse_sizes("1GiB", KEY)
    assert [size_for_rank(one, rank, 2, KEY).bytes_of(4 * GIB) for rank in range(2)] == [GIB, GIB]
    with pytest.raises(ConfigError, match="empty"):
        parse_sizes([], KEY)


def test_bad_amount_in_a_list_is_named_by_its_rank() -> None:
    with pytest.raises(ConfigError, match=r"memory_limit\[1\]: cannot read 'lots'"):
        parse_sizes(["1GiB", "lots"], KEY)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 3), (2, 3), (0, 1)])
def test_list_of_the_wrong_length_is_an_error_on_every_rank(rank: int, world_size: int) -> None:
    sizes = parse_sizes(["1GiB", "2GiB"], KEY)
    with pytest.raises(ConfigError, match=f"2 amounts for {world_size} ranks"):
        size_for_rank(sizes, rank, world_size, KEY)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (500 * 2**20, "500.0 MiB"), (int(38.4 * GIB), "38.4 GiB"),
     (GIB - 1, "1.0 GiB"), (3 * 2**40, "3.0 TiB"), (5000 * 2**40, "5000.0 TiB"), (-3 * GIB, "-3.0 GiB")],
)  # fmt: skip
def test_bytes_are_formatted_with_a_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("first", "second", "texts"),
    [
        (3 * GIB, 2 * GIB, ("3.0 GiB", "2.0 GiB")),
        (2.21 * 2**20, 2.19 * 2**20, ("2.21 MiB", "2.19 MiB")),
        (2**20 + 1, 2**20, ("1.000001 MiB", "1.000000 MiB")),
        (GIB, GIB, ("1.0 GiB", "1.0 GiB")),
    ],
)
def test_different_amounts_are_formatted_differently(first: float, second: float, texts: tuple[str, str]) -> None:
    assert format_apart(first, second) == texts


@given(st.integers(1, 2**50))
def test_formatted_amount_can_be_parsed(count: int) -> None:
    text = format_bytes(count)
    unit_bytes = parse_size(f"1{text.split()[1]}", KEY).bytes_of(2**60)
    assert abs(parse_size(text, KEY).bytes_of(2**60) - count) <= 0.05 * unit_bytes + 1


@pytest.mark.parametrize(
    ("count", "names", "phrase"),
    [(1, ("row",), "1 row"), (0, ("row",), "0 rows"), (2, ("retry", "retries"), "2 retries")],
)
def test_count_agrees_with_its_noun(count: int, names: tuple[str, ...], phrase: str) -> None:
    assert count_of(count, *names) == phrase


@pytest.mark.parametrize(
    ("name", "most", "hint"),
    [
        ("recover_from_omm", 1, "; did you mean recover_from_oom?"),
        ("h10", 2, "; did you mean h100 or a10?"),
        ("entirely different", 2, ""),
    ],
)
def test_hint_names_similar_words_or_is_empty(name: str, most: int, hint: str) -> None:
    assert did_you_mean(name, ["recover_from_oom", "h100", "a10", "4090"], most=most) == hint


@pytest.mark.parametrize(("value", "text"), [(None, "null"), ("a", "'a'"), ({"a": 1}, "{'a': 1}"), (0.5, "0.5")])
def test_value_is_shown_as_in_a_config(value: object, text: str) -> None:
    assert shown(value) == text
    assert shown("x" * 1000) == f"'{'x' * (LONGEST_SHOWN - 1)}..."


def test_invalid_choice_is_named_with_the_allowed_ones() -> None:
    check_choice("adaptive.search", "linear", ("linear", "binary"))
    with pytest.raises(ConfigError, match=r"^adaptive.search: 'guess' is unknown; allowed: linear, binary$"):
        check_choice("adaptive.search", "guess", ("linear", "binary"))


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert in_columns([("rows", "peak", ""), (1, "1.5 GiB", "<- chosen"), (16, "-", "")]) == (
        "  rows   peak\n  1      1.5 GiB   <- chosen\n  16     -"
    )
