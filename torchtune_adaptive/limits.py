"""What a microbatch may be so that it fits. A limit is a frozen value: a transition returns a new one."""

from dataclasses import dataclass

from torchtune_adaptive.errors import LimitExhaustedError


@dataclass(frozen=True)
class RowLimit:
    """At most `rows` samples in a microbatch, however long they are."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"a microbatch has at least 1 row, but the limit says {self.rows}")

    def fits(self, rows: int, length: int) -> bool:
        """Whether `rows` samples, padded to `length` tokens, are within the limit."""
        return rows <= self.rows


def shrink_after_oom(limit: RowLimit) -> RowLimit:
    """The next smaller limit, always a power of two: 8 -> 4 and 6 -> 4. Raises if one row did not fit."""
    if limit.rows == 1:
        raise LimitExhaustedError(
            "a microbatch of 1 row does not fit and cannot be made smaller; lower tokenizer.max_seq_len, "
            "set enable_activation_checkpointing: True, or train on more ranks"
        )
    return RowLimit(largest_power_of_two_below(limit.rows))


def largest_power_of_two_below(rows: int) -> int:
    """The largest power of two that is smaller than `rows` (which is at least 2)."""
    return 1 << ((rows - 1).bit_length() - 1)
