"""PPO with all adaptive features has the answers and weights of a run without them."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.fault_injection import FaultInjector
from tests.ranks import run_on_ranks
from tests.recipes.interrupted_runs import train_until
from tests.recipes.ppo.rollouts import ppo_config, saved
from tests.recipes.recorders import assert_same_figures, events_of, read_log
from tests.recipes.running import load_ours, run_ours
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rl.stages import FIND_VALUES, STAGES, TRAIN_POLICY, TRAIN_VALUE

RELATIVE = 1e-5
ON_TWO = ("batch_size=4", "ppo_batch_size=2", "forward_batch_size=4")
"""The samples per iteration and update of one rank with twice these sizes."""
SEARCHED = ("use_maximum_batch_size=True", "adaptive.round_to=none")
WIDER = ("ppo_batch_size=4",)
TIGHT = "2200KiB"
"""Enough for all four rows in stages without a backward, and for one or two rows when the policy trains."""
CASES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "one by one": ("forward_batch_size=1", "gradient_accumulation_steps=2"),
    "wider": WIDER,
    "unequal": (*WIDER, *SEARCHED, f"adaptive.memory_limit=[12MiB,{TIGHT}]"),
    "scarce": (*WIDER, f"adaptive.memory_limit=[{TIGHT},12MiB]"),
    "clipped": ("clip_grad_norm=0.01", "whiten_rewards=True"),
}
STOP = 3
"""The iteration in which a run ends between two stages, after the first checkpoint."""
RESUMED = (
    *("dataset.samples=32", "num_steps=32", "shuffle=True"),
    *("save_every_n_steps=2", "resume_from_checkpoint=auto"),
    "adaptive.regrow_after=0",
)


def train_and_stop(folder: Path, stop_at: int | None, *overrides: str) -> None:
    """Collective: train to the end, or until iteration `stop_at` has trained the value model. A stage fails in
    step 1.
    """
    recipe = load_ours("full_ppo")(ppo_config(folder, *ON_TWO, *RESUMED, *overrides))
    recipe.setup()
    FaultInjector(recipe.stages.runners[FIND_VALUES]).fail_at(rank=1, step=1, operation=40).__enter__()
    train_until(recipe, recipe.stages.runners[TRAIN_POLICY], stop_at)


def run_all(folder: Path) -> None:
    for case, overrides in CASES.items():
        run_ours("full_ppo", ppo_config(folder / case, *ON_TWO, *overrides))
    train_and_stop(folder / "whole", None)
    train_and_stop(folder / "stopped", STOP)


def resume(folder: Path) -> None:
    train_and_stop(folder / "stopped", None)
    train_and_stop(folder / "split anew", None, "gradient_accumulation_steps=2")


def run_alone(folder: Path) -> None:
    for case in ("plain", "clipped"):
        run_ours("full_ppo", ppo_config(folder / "alone" / case, *CASES[case]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ppo")
    run_on_ranks(2, run_all, folder, timeout_s=250, in_group=False)
    shutil.copytree(folder / "stopped", folder / "split anew")
    run_on_ranks(2, resume, folder, timeout_s=100, in_group=False)
    run_on_ranks(1, run_alone, folder, timeout_s=100, in_group=False)
    return folder


def compare(ours: Path, others: Path) -> None:
    """Compare the logged figures of answers, and the weights of both models."""
    figures = ("scores", "response_lengths", "kl", "policy_loss", "value_loss", "clipfrac")
    logs = (read_log(folder / "log.jsonl") for folder in (ours, others))
    assert_same_figures(*logs, figures, rel=RELATIVE, abs=1e-6)
    torch.testing.assert_close(saved(ours), saved(others), rtol=RELATIVE, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "like"),
    [
        pytest.param("one by one", "plain", id="any split of an iteration"),
        pytest.param("unequal", "wider", id="searched on ranks with unequal memory"),
        pytest.param("scarce", "wider", id="too little memory on a rank"),
        *(pytest.param(case, f"alone/{case}", id=f"{case}, two ranks and one") for case in ("plain", "clipped")),
    ],
)
def test_answers_and_weights_are_equal(runs: Path, case: str, like: str) -> None:
    compare(runs / case, runs / like)


def test_clipping_and_whitening_have_an_effect(runs: Path) -> None:
    plain, clipped = (saved(runs / case) for case in ("plain", "clipped"))
    assert any(not torch.allclose(plain[name], clipped[name]) for name in plain)
    assert all(line["grad_norm"] > 0 == line["skipped_updates"] for line in read_log(runs / "clipped" / "log.jsonl"))


def test_resumed_run_ends_with_the_weights_of_an_uninterrupted_run(runs: Path) -> None:
    whole, stopped = saved(runs / "whole"), saved(runs / "stopped")
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    lines = read_log(runs / "stopped" / "log.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["values/microbatch_rows"] for line in lines] == [2] * 4, "limits survive"


def test_resumed_run_may_split_its_updates_differently(runs: Path) -> None:
    whole, split = saved(runs / "whole"), saved(runs / "split anew")
    for name, weight in split.items():
        torch.testing.assert_close(weight, whole[name], rtol=RELATIVE, atol=1e-6, msg=name)
    microbatches = [line["train_policy/microbatches"] for line in read_log(runs / "split anew" / "log.jsonl")]
    assert microbatches == [*[microbatches[0]] * 2, *[2 * microbatches[0]] * 2]


def go_on_alone(folder: Path) -> str:
    """Return the error of a one-rank run that resumes a checkpoint of two ranks."""
    recipe = load_ours("full_ppo")(ppo_config(folder, *ON_TWO, *RESUMED, "num_steps=64"))
    with pytest.raises(ConfigError) as error:
        recipe.setup()
    return str(error.value)


def test_different_number_of_ranks_is_refused_because_iterations_would_change(runs: Path) -> None:
    [message] = run_on_ranks(1, go_on_alone, runs / "stopped", timeout_s=60, in_group=False)
    assert "saved on 2 ranks, but there are 1 now" in message
    assert message.endswith("resume on 2 ranks")


def test_every_stage_is_measured_separately_with_one_result_on_unequal_ranks(runs: Path) -> None:
    found = {event["stage"]: event for event in events_of(runs / "unequal", "search")}
    assert tuple(found) == STAGES
    assert {event["budget_bytes"] for event in found.values()} == {2200 * 2**10}
    assert all(0 < event["peak_bytes"] <= event["budget_bytes"] for event in found.values())
    assert found[TRAIN_POLICY]["after"] == 1
    assert {found[stage]["after"] for stage in STAGES[:5]} == {4}
    assert events_of(runs / "unequal", "recovery") == []


def test_memory_shortage_on_one_rank_shrinks_the_limit_on_all(runs: Path) -> None:
    recoveries = events_of(runs / "scarce", "recovery")
    assert TRAIN_POLICY in {event["stage"] for event in recoveries} <= {TRAIN_VALUE, TRAIN_POLICY}
    assert {tuple(event["ranks"]) for event in recoveries} == {(0,)}
