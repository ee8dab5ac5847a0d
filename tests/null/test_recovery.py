"""Steps of the recipes recover from the errors that torch's own allocator raises; `tests.null.recovery` tries more."""

from pathlib import Path

import pytest

from tests.null.processes import OnNull
from tests.null.recovery import Case, run
from tests.null.scarce import PPO, in_a_collective, in_the_update
from tests.ranks import RankFailed

CASES = {Case("full", 2, expandable=True): 80, Case("lora"): 40, Case("full_dpo"): 80, Case(PPO): 200}
"""And which operations are tried: every so many."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_that_runs_out_of_memory_is_repeated_with_all_memory_it_had(on_null: OnNull, case: Case) -> None:
    counted = run(on_null, case, every=CASES[case])
    assert counted.recovered >= counted.operations - 1  # the last operations may need no memory
    assert (counted.most_left_over_bytes, counted.wrong) == (0, 0)


def test_no_room_for_gloo_to_reduce_is_recovered(on_null: OnNull, tmp_path: Path) -> None:
    assert on_null(in_a_collective, "full", str(tmp_path / "run"), "reduce_scatter", ranks=2) == [1, 1]


def test_no_room_for_gloo_to_gather_ends_the_run_with_one_true_message(on_null: OnNull, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="an FSDP collective ran out of memory on rank 0 inside gloo") as raised:
        on_null(in_a_collective, "full", str(tmp_path / "run"), "allgather", ranks=2)
    assert "besides FSDP" not in str(raised.value)


def test_no_room_for_the_optimizer_ends_the_run_with_one_message(on_null: OnNull, tmp_path: Path) -> None:
    said = on_null(in_the_update, "full", str(tmp_path / "run"))
    assert said.startswith("OutOfMemoryError: ")
    assert "the optimizer step" in said
