"""The most of something that still fits, found by bisection."""

from bisect import bisect_left
from collections.abc import Callable


def most_that_fit(fits: Callable[[int], bool], at_most: int) -> int:
    """The largest number up to `at_most` that fits, where every smaller one fits too; 0 if 1 does not."""
    return bisect_left(range(1, at_most + 1), True, key=lambda number: not fits(number))
