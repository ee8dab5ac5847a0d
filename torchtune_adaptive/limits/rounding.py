"""The rows that a microbatch may be given: all numbers, powers of two, or divisors of the step."""

from collections.abc import Sequence

from torchtune_adaptive.errors import ConfigError

MAX_ROWS = 4096
"""Searched up to where the user sets no bound; ends the search on memory that does not grow with the rows."""

ROUNDINGS = ("power_of_two", "none", "divisor")


def rungs_up_to(max_rows: int | None, round_to: str, samples_per_step: int | None = None) -> Sequence[int]:
    """The rows that may be chosen, ascending: all of them, powers of two, or divisors of the step."""
    most = MAX_ROWS if max_rows is None else max_rows
    if most < 1:
        raise ConfigError(f"max_rows: {most} leaves nothing to search; allowed: 1 or more, or None")
    if round_to == "none":
        return range(1, most + 1)
    if round_to == "power_of_two":
        return [1 << exponent for exponent in range(most.bit_length())]
    if round_to == "divisor" and samples_per_step is not None:
        return [rows for rows in range(1, min(most, samples_per_step) + 1) if samples_per_step % rows == 0]
    raise ConfigError(
        f"round_to: {round_to!r} is unknown, or samples_per_step is missing; allowed: {', '.join(ROUNDINGS)}"
    )
