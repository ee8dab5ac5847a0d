"""A token budget that is asked about, beside what fits."""

from __future__ import annotations

from dataclasses import dataclass

from torchtune_adaptive.prediction.capacity import Capacity


@dataclass(frozen=True)
class TokenBudget:
    """`adaptive.token_budget` in one stage."""

    asked: int | str
    """The number of the config, or auto."""
    samples: int
    """What a rank has of them in a step: no microbatch has more, however large the budget."""

    def fits(self, capacity: Capacity, row_tokens: int) -> bool:
        """Whether microbatches of such rows fit; auto does, as far as one row does."""
        if not isinstance(self.asked, int):
            return capacity.most_rows > 0
        return self.asked // row_tokens >= 1 and min(self.samples, self.asked // row_tokens) <= capacity.most_rows
