"""Which ranks have to have issued as many collectives as which others."""

from __future__ import annotations

import pytest

from torchtune_adaptive.errors import UnrecoverableError
from torchtune_adaptive.step.reports import Report, Reports

PAIRS = ((0, 1), (2, 3))


def reports(*positions: tuple[int, int]) -> Reports:
    return Reports(Report(position=everywhere, tensor_position=shared) for everywhere, shared in positions)


def test_groups_may_differ_in_what_they_share() -> None:
    of_pairs = reports((9, 20), (9, 20), (9, 22), (9, 22))
    of_pairs.check_positions(PAIRS)
    with pytest.raises(UnrecoverableError, match=r"\[20, 20, 22, 22\], by rank"):
        of_pairs.check_positions([(0, 1, 2, 3)])


def test_ranks_of_a_group_may_not() -> None:
    with pytest.raises(UnrecoverableError, match=r"\[22, 20\], by rank"):
        reports((9, 20), (9, 20), (9, 22), (9, 20)).check_positions(PAIRS)


def test_nor_may_groups_in_what_all_of_them_share() -> None:
    with pytest.raises(UnrecoverableError, match=r"\[9, 9, 8, 8\], by rank"):
        reports((9, 20), (9, 20), (8, 20), (8, 20)).check_positions(PAIRS)
