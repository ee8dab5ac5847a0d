"""`most_that_fit` against trying every number."""

from hypothesis import given
from hypothesis import strategies as st

from torchtune_adaptive.bisecting import most_that_fit


@given(st.integers(0, 40), st.integers(-1, 50))
def test_it_finds_what_trying_every_number_finds(at_most: int, bound: int) -> None:
    assert most_that_fit(lambda number: number <= bound, at_most) == max(0, min(at_most, bound))


def test_it_looks_at_a_few_of_many() -> None:
    seen: list[int] = []

    def fits(number: int) -> bool:
        seen.append(number)
        return number <= 700_000

    assert most_that_fit(fits, 2**20) == 700_000
    assert len(seen) <= 21
    assert all(1 <= number <= 2**20 for number in seen)
