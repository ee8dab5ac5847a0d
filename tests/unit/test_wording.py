"""Phrases that many messages share."""

import pytest

from torchtune_adaptive.errors import ConfigError, check_choice
from torchtune_adaptive.wording import LONGEST_SHOWN, count_of, did_you_mean, in_columns, nearest, ranks_named, shown


@pytest.mark.parametrize(
    ("count", "names", "phrase"),
    [(1, ("row",), "1 row"), (0, ("row",), "0 rows"), (2, ("retry", "retries"), "2 retries")],
)
def test_a_count_is_in_the_number_of_its_noun(count: int, names: tuple[str, ...], phrase: str) -> None:
    assert count_of(count, *names) == phrase


@pytest.mark.parametrize(
    ("name", "most", "hint"),
    [
        ("recover_from_omm", 1, "; did you mean recover_from_oom?"),
        ("h10", 2, "; did you mean h100 or a10?"),
        ("entirely different", 2, ""),
    ],
)
def test_a_hint_names_what_is_near_and_says_nothing_where_nothing_is(name: str, most: int, hint: str) -> None:
    assert did_you_mean(name, ["recover_from_oom", "h100", "a10", "4090"], most=most) == hint


def test_the_nearest_name_is_one_or_none() -> None:
    assert nearest("lrr", ["lr", "betas"]) == "lr"
    assert nearest("colour", ["lr", "betas"]) is None


@pytest.mark.parametrize(("value", "text"), [(None, "null"), ("a", "'a'"), ({"a": 1}, "{'a': 1}"), (0.5, "0.5")])
def test_a_value_is_shown_as_a_config_has_it(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_long_value_is_cut() -> None:
    assert shown("x" * 1000) == f"'{'x' * (LONGEST_SHOWN - 1)}..."


def test_a_value_that_is_no_choice_is_named_with_those_that_are() -> None:
    check_choice("adaptive.search", "linear", ("linear", "binary"))
    with pytest.raises(ConfigError, match=r"^adaptive.search: 'guess' is unknown; allowed: linear, binary$"):
        check_choice("adaptive.search", "guess", ("linear", "binary"))


def test_ranks_are_named_in_order() -> None:
    assert (ranks_named({1}), ranks_named([2, 0])) == ("rank 1", "ranks 0, 2")


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    assert in_columns([("rows", "peak", ""), (1, "1.5 GiB", "<- chosen"), (16, "-", "")]) == (
        "  rows   peak\n  1      1.5 GiB   <- chosen\n  16     -"
    )
