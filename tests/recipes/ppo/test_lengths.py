"""PPO under a token budget: the answers and weights of row limits, after any failure, with equal numbers of
microbatches on all ranks.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fault_injection import FaultInjector
from tests.ranks import run_on_ranks
from tests.recipes.ppo.rollouts import ppo_config
from tests.recipes.ppo.test_runs import compare
from tests.recipes.recorders import events_of, read_log
from tests.recipes.running import load_ours
from torchtune_adaptive.engine.length_profile import MOST_POINTS
from torchtune_adaptive.engine.plans import Plan
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.report.journal import STEPS_FILE
from torchtune_adaptive.rl.stages import FORWARD, STAGES
from torchtune_adaptive.tune import distributed

NEW = 12
VARIED = (
    f"stop_token_ids=[{','.join(map(str, range(3, 256, 9)))}]",  # so that answers have any length
    f"max_generated_tokens={NEW}",
    "batch_size=8",
    "ppo_batch_size=8",
    "ppo_epochs=1",
    "forward_batch_size=8",
    "dataset.samples=32",
    "num_steps=32",
)
ROOM = 64
UNEQUAL = "[40MiB,2600KiB]"
AUTO = ("adaptive.token_budget=auto", f"adaptive.memory_limit={UNEQUAL}")
BUDGET = f"adaptive.token_budget={ROOM}"
CASES: dict[str, tuple[str, ...]] = {
    "rows": (),
    "budget": (BUDGET,),
    "auto": AUTO,
}


class Cut(NamedTuple):
    stage: str
    step: int
    plan: Plan


Cuts = dict[str, list[Cut]]
"""Splits of one rank, by name of the run."""


def set_up(folder: Path, *overrides: str) -> tuple[Any, list[Cut]]:
    """Collective: set up a recipe; return it with a list that collects its splits on this rank."""
    recipe = load_ours("full_ppo")(ppo_config(folder, *VARIED, *overrides))
    recipe.setup()
    cuts: list[Cut] = []
    recipe.stages.runners.training.recovery.on_attempt = lambda *attempt: cuts.append(Cut(*attempt))
    return recipe, cuts


def train(recipe: Any) -> None:
    recipe.train()
    recipe.cleanup()


def fail_everywhere(folder: Path) -> list[Cut]:
    """Collective: run out of memory in the first step of every stage, on alternating ranks."""
    recipe, cuts = set_up(folder, BUDGET, "adaptive.regrow_after=0")
    for number, stage in enumerate(STAGES):
        FaultInjector(recipe.stages.runners[stage]).fail_at(rank=number % 2, step=1, operation=40).__enter__()
    train(recipe)
    return cuts


def run_all(folder: Path) -> Cuts:
    cuts = Cuts()
    for case, overrides in CASES.items():
        recipe, cuts[case] = set_up(folder / case, *overrides)
        train(recipe)
    cuts["failing"] = fail_everywhere(folder / "failing")
    return cuts


class Runs(NamedTuple):
    folder: Path
    cuts: list[Cuts]
    """Splits of each rank."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("ppo")
    return Runs(folder, run_on_ranks(2, run_all, folder, timeout_s=200, in_group=False))


@pytest.mark.parametrize("case", ["budget", "auto", "failing"])
def test_token_budget_does_not_change_answers_or_weights(runs: Runs, case: str) -> None:
    compare(runs.folder / case, runs.folder / "rows")


def test_every_stage_has_its_token_limit_which_shrinks_independently(runs: Runs) -> None:
    recoveries = events_of(runs.folder / "failing", "recovery")
    assert [(event["step"], event["stage"], event["unit"]) for event in recoveries] == [
        (1, stage, "tokens") for stage in STAGES
    ]
    assert [tuple(event["ranks"]) for event in recoveries] == [(n % 2,) for n in range(7)]
    last = read_log(runs.folder / "failing" / "log.jsonl")[-1]
    assert last["oom_recoveries"] == len(STAGES)
    assert {last[f"{stage.replace(' ', '_')}/recoveries"] for stage in STAGES} == {1}


def test_ranks_with_different_answers_run_equally_many_microbatches(runs: Runs) -> None:
    """A rank that would need fewer gets smaller ones."""
    for case in ("budget", "auto", "failing"):
        mine, its = (ran[case] for ran in runs.cuts)
        assert [(cut.stage, cut.step, len(cut.plan)) for cut in mine] == [
            (cut.stage, cut.step, len(cut.plan)) for cut in its
        ]
        assert [cut.plan for cut in mine] != [cut.plan for cut in its]


def test_short_answers_share_microbatches_and_future_answers_count_in_full(runs: Runs) -> None:
    log = read_log(runs.folder / "budget" / "log.jsonl")
    for line in log:
        for stage in STAGES:
            assert line[f"{stage.replace(' ', '_')}/microbatch_tokens"] <= ROOM
        assert line["generate/microbatches"] > max(line[f"{n.replace(' ', '_')}/microbatches"] for n in FORWARD)
    assert max(line["values/microbatch_rows"] for line in log) > ROOM // (16 + NEW)


def test_each_stage_is_measured_over_lengths_without_failures(runs: Runs) -> None:
    found = {event["stage"]: event for event in events_of(runs.folder / "auto", "search")}
    assert tuple(found) == STAGES
    assert {(event["unit"], event["budget_bytes"]) for event in found.values()} == {("bytes", 2600 * 2**10)}
    assert events_of(runs.folder / "auto", "recovery") == []
    for line in read_log(runs.folder / "auto" / "out" / STEPS_FILE):
        assert 0.7 * line["budget_bytes"] < line["peak_bytes"] <= line["budget_bytes"]
        assert line["train_policy/microbatches"] > 1
    longest = {}
    for stage in STAGES:
        points = found[stage]["result"]["points"]
        # only the last points, which the surfaces allow, may run out of memory
        assert all(point["peak"]["fits"] for point in points[: MOST_POINTS - 1])
        longest[stage] = points[0]["length"]
    assert set(longest.values()) == {16 + NEW}


LONG = {
    "named": ("adaptive.token_budget=18",),
    "no room": (f"adaptive.token_budget={NEW}",),
}
ALONE = ("batch_size=2", "ppo_batch_size=2", "num_steps=4", "dataset.samples=4")


def run_too_long(folder: Path) -> dict[str, str]:
    message = {}
    for case, overrides in LONG.items():
        try:
            recipe, _ = set_up(folder / case, *ALONE, *overrides)
            train(recipe)
        except AdaptiveError as error:
            message[case] = str(error)
            distributed.leave()
    return message


def test_prompt_without_space_for_an_answer_is_named(tmp_path: Path) -> None:
    [message] = run_on_ranks(1, run_too_long, tmp_path, timeout_s=60, in_group=False)
    assert "of the dataset has" in message["named"]
    assert f"room for {18 - NEW} plus an answer; raise adaptive.token_budget, or lower max_gen" in message["named"]
    assert "room for 0 plus an answer; raise adaptive.token_budget, or lower max_gen" in message["no room"]
    assert read_log(tmp_path / "named" / "log.jsonl") == []
