"""PPO has the same answers and weights under any limits, after any failure, on any mesh, and after a stop."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fault_injection import FaultInjector
from tests.ranks import RankFailed, run_on_ranks
from tests.recipes.comparisons import Group, Run, Runs, assert_equals_its_reference, compared, runs_in
from tests.recipes.ppo.rollouts import STAGES, give_answers, ppo_config
from tests.recipes.running import run_as_command, run_ours
from torchtune_adaptive.engine.length_profile import _PADDED
from torchtune_adaptive.rl.ppo import VALUE_FOLDER
from torchtune_adaptive.rl.stages import FORWARD, TRAIN_POLICY, TRAIN_VALUE


def fail_in_every_stage(recipe: Any) -> None:
    """Run out of memory in the first step of every stage, on the first and the last rank in turn."""
    last = torch.distributed.get_world_size() - 1
    for number, stage in enumerate(STAGES):
        faults = FaultInjector(recipe.stages[stage])
        faults.fail_at(rank=last * (number % 2), step=1, operation=40).__enter__()


ON_TWO = ("batch_size=4", "ppo_batch_size=2", "forward_batch_size=4")
"""The samples per iteration and update of one rank with twice these sizes."""
ALONE = ("batch_size=8", "ppo_batch_size=4", "forward_batch_size=8")
WIDER = ("ppo_batch_size=4",)
TIGHT_KIB = 2200
"""Enough for all four rows in stages without a backward, and for one or two rows when the policy trains."""
UNEQUAL = (f"adaptive.memory_limit=[12MiB,{TIGHT_KIB}KiB]", "use_maximum_batch_size=True", "adaptive.round_to=none")
RESUMED = ("save_every_n_steps=2", "resume_from_checkpoint=auto", "adaptive.regrow_after=0")
CLIPPED = ("clip_grad_norm=0.01", "whiten_rewards=True")
LONGEST_PROMPT, NEW, ROOM, BUDGET_KIB = 16, 12, 64, 2600
VARIED = (
    f"stop_token_ids=[{','.join(map(str, range(3, 256, 9)))}]",  # so that answers have any length
    *(f"max_generated_tokens={NEW}", "batch_size=8", "ppo_batch_size=8", "ppo_epochs=1", "forward_batch_size=8"),
    *("dataset.samples=32", "num_steps=32"),
)
BUDGET = (f"adaptive.token_budget={ROOM}", "adaptive.regrow_after=0")
AUTO = ("adaptive.token_budget=auto", f"adaptive.memory_limit=[40MiB,{BUDGET_KIB}KiB]")
SHORT = ("batch_size=2", "ppo_batch_size=2", "ppo_epochs=1", "forward_batch_size=2", "num_steps=8", "dataset.samples=8")
COMPARED: dict[str, Any] = {
    "figures": (
        *("scores", "num_stop_tokens", "response_lengths", "rlhf_reward", "kl", "kl_reward"),
        *("loss", "policy_loss", "value_loss", "clipfrac"),
    ),
    "abs": 1e-5,
    "config": ppo_config,
}


def like_torchtunes(*overrides: str) -> Group:
    """Compare with torchtune's recipe on the same answers. An update uses all answers of an iteration, so that their
    order does not matter.
    """
    base = ("ppo_batch_size=8", f"value_checkpointer.output_dir=FOLDER/out/epoch_0/{VALUE_FOLDER}", *overrides)
    return Group("full_ppo", 1, base, {"ours": Run(prepare=give_answers)}, **COMPARED)


GROUPS = {
    "torchtune's": like_torchtunes(),
    "torchtune's, penalised": like_torchtunes(
        *("penalise_no_eos=True", "min_response_length=2", "temperature=0.7", "loss.value_coeff=0.5")
    ),
    "torchtune's, checkpointed": like_torchtunes(
        *("enable_activation_checkpointing=True", "gamma=0.9", "kl_coeff=0.2", "stop_token_ids=null")
    ),
    "rows": Group(
        "full_ppo",
        2,
        ON_TWO,
        {
            "plain": Run(like=""),
            "one by one": Run(("forward_batch_size=1", "gradient_accumulation_steps=2"), like="plain"),
            "wider": Run(WIDER, like=""),
            "searched on unequal ranks": Run((*WIDER, *UNEQUAL), like="wider"),
            "scarce": Run((*WIDER, f"adaptive.memory_limit=[{TIGHT_KIB}KiB,12MiB]"), like="wider"),
            "clipped": Run(CLIPPED, like=""),
            "plain on one rank": Run(ALONE, like="plain", ranks=1),
            "clipped on one rank": Run((*ALONE, *CLIPPED), like="clipped", ranks=1),
            "stopped": Run(RESUMED, like="plain", first=RESUMED, prepare=fail_in_every_stage),
            "split anew": Run((*RESUMED, "gradient_accumulation_steps=2"), like="plain", first=RESUMED),
        },
        stop_at=3,
        **COMPARED,
    ),
    "lengths": Group(
        "full_ppo",
        2,
        VARIED,
        {
            "rows": Run(like=""),
            "budget": Run(BUDGET, like="rows"),
            "measured": Run(AUTO, like="rows"),
            "failing": Run(BUDGET, like="rows", prepare=fail_in_every_stage),
        },
        **COMPARED,
    ),
    "four ranks": Group(
        "full_ppo",
        4,
        ("batch_size=2", "ppo_batch_size=2", "forward_batch_size=2"),
        {
            "flat": Run(like=""),
            "replicas": Run(
                ("data_parallel_replicate_dim=2", "adaptive.regrow_after=0"), like="flat", prepare=fail_in_every_stage
            ),
        },
        **COMPARED,
    ),
    "short": Group(
        "full_ppo",
        2,
        (*SHORT, "max_generated_tokens=4"),
        {
            "plain": Run(like=""),
            "compiled": Run(("compile=True",), like="plain"),
            "bf16": Run(("dtype=bf16",), like=""),
        },
        **COMPARED,
    ),
}
runs = runs_in(GROUPS)


@pytest.mark.smoke("torchtune's, ours")
@pytest.mark.parametrize(("group", "name"), compared(GROUPS))
def test_figures_answers_and_weights_are_those_of_the_reference(runs: Runs, group: str, name: str) -> None:
    of = GROUPS[group]
    ours, reference = runs(group, name), runs(group, of.runs[name].like)
    assert_equals_its_reference(of, name, ours, reference)
    assert reference.log[0].keys() <= ours.log[0].keys()


def test_clipping_and_whitening_have_an_effect(runs: Runs) -> None:
    plain, clipped = runs("rows", "plain").weights(), runs("rows", "clipped").weights()
    assert any(not torch.allclose(plain[name], clipped[name]) for name in plain)
    assert all(line["grad_norm"] > 0 == line["skipped_updates"] for line in runs("rows", "clipped").log)


def test_every_stage_is_measured_separately_with_one_result_on_unequal_ranks(runs: Runs) -> None:
    run = runs("rows", "searched on unequal ranks")
    found = {event["stage"]: event for event in run.events("search")}
    assert tuple(found) == STAGES
    assert {event["budget_bytes"] for event in found.values()} == {TIGHT_KIB * 2**10}
    assert all(0 < event["peak_bytes"] <= event["budget_bytes"] for event in found.values())
    assert found[TRAIN_POLICY]["after"] == 1
    assert {found[stage]["after"] for stage in STAGES[:5]} == {4}
    assert run.events("recovery") == []


def test_memory_shortage_on_one_rank_shrinks_the_limit_on_all(runs: Runs) -> None:
    recoveries = runs("rows", "scarce").events("recovery")
    assert TRAIN_POLICY in {event["stage"] for event in recoveries} <= {TRAIN_VALUE, TRAIN_POLICY}
    assert {tuple(event["ranks"]) for event in recoveries} == {(0,)}


@pytest.mark.parametrize(("group", "name", "last"), [("lengths", "failing", 1), ("four ranks", "replicas", 3)])
def test_every_stage_recovers_and_shrinks_its_own_limit(runs: Runs, group: str, name: str, last: int) -> None:
    recoveries = runs(group, name).events("recovery")
    found = [(event["step"], event["stage"], event["ranks"]) for event in recoveries]
    assert found == [(1, stage, [last * (number % 2)]) for number, stage in enumerate(STAGES)]
    assert {event["unit"] for event in recoveries} == {"tokens" if group == "lengths" else "rows"}
    end = runs(group, name).log[-1]
    assert end["oom_recoveries"] == len(STAGES)
    assert {end[f"{stage.replace(' ', '_')}/recoveries"] for stage in STAGES} == {1}


def test_short_answers_share_microbatches_and_future_answers_count_in_full(runs: Runs) -> None:
    log = runs("lengths", "budget").log
    for line in log:
        for stage in STAGES:
            assert line[f"{stage.replace(' ', '_')}/microbatch_tokens"] <= ROOM
        assert line["generate/microbatches"] > max(line[f"{n.replace(' ', '_')}/microbatches"] for n in FORWARD)
    assert max(line["values/microbatch_rows"] for line in log) > ROOM // (LONGEST_PROMPT + NEW)


def test_each_stage_is_measured_over_lengths_without_failures(runs: Runs) -> None:
    run = runs("lengths", "measured")
    found = {event["stage"]: event for event in run.events("search")}
    assert tuple(found) == STAGES
    assert {(event["unit"], event["budget_bytes"]) for event in found.values()} == {("bytes", BUDGET_KIB * 2**10)}
    assert run.events("recovery") == []
    for line in run.steps:
        assert 0.7 * line["budget_bytes"] < line["peak_bytes"] <= line["budget_bytes"]
        assert line["train_policy/microbatches"] > 1
    for event in found.values():
        points = event["result"]["points"]
        # only the last points, which the surfaces allow, may run out of memory
        assert all(point["peak"]["fits"] for point in points[: len(_PADDED)])
        assert points[0]["length"] == LONGEST_PROMPT + NEW


def test_bf16_run_trains_both_models_and_stays_close(runs: Runs) -> None:
    weights, expected = runs("short", "bf16").weights(), runs("short", "plain").weights()
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    of_heads = [name for name in weights if name.endswith("output.weight")]
    assert len(of_heads) == 2
    for name in of_heads:
        torch.testing.assert_close(weights[name].float(), expected[name], rtol=0.05, atol=0.02, msg=name)
    first, plain = runs("short", "bf16").log[0], runs("short", "plain").log[0]
    assert first["kl"] == 0.0
    assert first["value_loss"] == pytest.approx(plain["value_loss"], rel=0.3)


def test_limits_survive_a_stop_and_a_resumed_run_may_split_anew(runs: Runs) -> None:
    assert [line["values/microbatch_rows"] for line in runs("rows", "stopped").log] == [2, 2, 2]
    first, *others = (line["train_policy/microbatches"] for line in runs("rows", "split anew").log)
    assert others == [first, 2 * first]


def resume_longer(folder: Path) -> None:
    run_ours("full_ppo", ppo_config(folder, *ON_TWO, *RESUMED, "num_steps=64"))


def test_run_is_refused_on_another_number_of_ranks(runs: Runs) -> None:
    with pytest.raises(RankFailed, match="ConfigError: the checkpoint was saved on 2 ranks"):
        run_on_ranks(1, resume_longer, runs("rows", "stopped").folder, timeout_s=60, in_group=False)


@pytest.mark.parametrize("kib", [2048, 512], ids=["no row", "not even the models"])
def test_if_no_row_fits_every_rank_reports_the_required_memory(kib: int, tmp_path: Path) -> None:
    adam = ("optimizer._component_=torch.optim.AdamW", "optimizer.lr=0.001", "batch_size=4")
    searched = (f"adaptive.memory_limit=[9MiB,{kib}KiB]", "use_maximum_batch_size=True")
    ended = run_as_command(2, "full_ppo", tmp_path / "run", *adam, *searched, config=ppo_config)
    assert [each.status for each in ended] == [1, 1]
    [error] = {line.partition(": ")[2] for each in ended for line in each.output.splitlines() if line[:5] == "error"}
    assert "on rank 1" in error
    assert "max_generated_tokens" in error
