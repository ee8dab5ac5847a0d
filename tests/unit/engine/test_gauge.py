"""What stages of one step read of a memory that they share."""

from types import SimpleNamespace
from typing import Any

from torchtune_adaptive.engine.memory import Gauge


def retries_seen(*, shared: bool) -> list[int]:
    """Of two stages, by turns, where the allocator retries three times in the second one only."""
    memory: Any = SimpleNamespace(retries=0, peak_bytes=1, budget_bytes=2)
    first, second = (Gauge(memory, shared=shared) for _ in range(2))
    seen = []
    for _ in range(2):
        first.begin_step()
        seen.append(first.read().retries)
        second.begin_step()
        memory.retries += 3
        seen.append(second.read().retries)
    return seen


def test_a_stage_is_not_blamed_for_the_retries_of_another() -> None:
    assert retries_seen(shared=True) == [0, 3, 0, 3]


def test_a_step_of_one_stage_also_counts_what_happens_between_its_passes() -> None:
    assert retries_seen(shared=False) == [0, 3, 3, 3]
