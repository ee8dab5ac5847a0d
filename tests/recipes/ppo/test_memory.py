"""PPO where memory or a process fails: a critic larger than the policy, any place of an answer, a kill amid a save."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchtune.training import FullModelTorchTuneCheckpointer

from tests.ranks import RankFailed, free_ports, run_on_ranks
from tests.recipes.ppo.rollouts import load_ppo, ppo_config, run_ppo, saved
from tests.recipes.recording import events_of
from torchtune_adaptive.errors import OneRowDoesNotFitError
from torchtune_adaptive.rl.rollouts import Rollout, groups_of
from torchtune_adaptive.rl.stages import GENERATE, TRAIN_POLICY, TRAIN_VALUE
from torchtune_adaptive.testing import FaultInjector
from torchtune_adaptive.tune import place

FORWARD_BATCH_SIZE = 4
LARGE_CRITIC = (
    "reward_and_value_model.num_layers=6",
    "reward_and_value_model.intermediate_dim=1024",
    "batch_size=32",
    "ppo_batch_size=32",
    f"forward_batch_size={FORWARD_BATCH_SIZE}",
    "gradient_accumulation_steps=8",
    "num_steps=64",
    "dataset.samples=64",
    "adaptive.memory_limit=44MiB",
    "adaptive.round_to=none",
)
PLACES = 8


def sized_for_each(folder: Path, ports: list[int]) -> None:
    from torchtune_adaptive.demo.model import demo_classifier
    from torchtune_adaptive.demo.weights import ensure_made

    ensure_made(
        folder / "weights" / "critic.pt", lambda: demo_classifier(num_layers=6, intermediate_dim=1024).state_dict()
    )
    plain = "torchtune.training.FullModelTorchTuneCheckpointer"
    files = [
        f"{key}.{name}={value}"
        for key in ("value_checkpointer", "reward_checkpointer")
        for name, value in (("_component_", plain), ("checkpoint_files", "[critic.pt]"))
    ]
    run_ppo(ppo_config(folder / "each", *LARGE_CRITIC, *files, "use_maximum_batch_size=True"), ports[0])
    rows = {event["stage"]: event["after"] for event in events_of(folder / "each", "search")}
    of_policy = f"gradient_accumulation_steps={32 // rows[TRAIN_POLICY]}"
    run_ppo(ppo_config(folder / "policy", *LARGE_CRITIC, *files, of_policy), ports[1])


def test_a_critic_that_is_larger_than_the_policy_has_a_limit_of_its_own(tmp_path: Path) -> None:
    run_on_ranks(2, sized_for_each, tmp_path, free_ports(2), timeout_s=150, in_group=False)
    rows = {event["stage"]: event["after"] for event in events_of(tmp_path / "each", "search")}
    assert 1 <= rows[TRAIN_VALUE] < rows[TRAIN_POLICY]
    assert rows[GENERATE] > FORWARD_BATCH_SIZE, "which a search has no use for"
    assert events_of(tmp_path / "each", "recovery") == []
    too_many = [event["stage"] for event in events_of(tmp_path / "policy", "recovery")]
    assert too_many
    assert set(too_many) == {TRAIN_VALUE}


def refused_for_want_of_memory(folder: Path, port: int, limits: str) -> str:
    """Collective: what a run says whose models and optimizer are too much for its ranks."""
    os.environ["MASTER_PORT"] = str(port)
    adam = ("optimizer._component_=torch.optim.AdamW", "optimizer.lr=0.001")
    searched = (f"adaptive.memory_limit={limits}", "use_maximum_batch_size=True")
    recipe = load_ppo()(ppo_config(folder, *adam, *searched, "batch_size=4"))
    with pytest.raises(OneRowDoesNotFitError) as error:
        recipe.setup()
    place.leave()
    return str(error.value)


@pytest.mark.parametrize("limits", ["[9MiB,2MiB]", "[9MiB,0.5MiB]"])
def test_where_not_one_row_fits_every_rank_says_what_it_would_need(tmp_path: Path, limits: str) -> None:
    """Also where a rank has no room for the models alone."""
    arguments = tmp_path / "run", free_ports(1)[0], limits
    told = run_on_ranks(2, refused_for_want_of_memory, *arguments, timeout_s=60, in_group=False)
    assert told[0] == told[1]
    assert f"on rank 1, whose budget is {'2.0 MiB' if '2MiB' in limits else '512.0 KiB'}" in told[0]


def generate_failing(folder: Path, port: int, layer_by_layer: bool) -> tuple[int, int, int, bool]:
    """Collective: places that failed on one rank, that were recovered from, with other answers; what is left behind."""
    os.environ["MASTER_PORT"] = str(port)
    recipe = load_ppo()(ppo_config(folder, "batch_size=4", "ppo_batch_size=4", "forward_batch_size=2"))
    recipe.setup()
    runner, model = recipe.stages.runners[GENERATE], recipe.models.policy
    if layer_by_layer:
        recipe.stages.go_layer_by_layer()
    prompts = [recipe.iterations.data.dataset[index] for index in range(4)]
    fresh = runner.state_dict()

    def answered(place: int | None) -> tuple[list[Rollout], int, int]:
        """Collective: operations of this rank's answers, the first of which may fail at a place."""
        rollouts = [rollout for _, group in groups_of(prompts, iteration=1, new_tokens=6) for rollout in group]
        runner.load_state_dict(fresh)
        with FaultInjector(runner) as faults:
            if place is None:
                faults.count(rank=dist.get_rank(), step=1)
            else:
                faults.fail_at(rank=1, step=1, operation=place)
            result = runner.run(rollouts, step=1)
        return rollouts, result.recoveries, len(faults.operations)

    expected, _, operations = answered(None)
    injected = recovered = wrong = 0
    for at in range(1, operations, -(-operations // PLACES)):
        found, recoveries, _ = answered(at)
        injected += 1
        recovered += recoveries == 1
        wrong += any(not torch.equal(a.answer, b.answer) for a, b in zip(found, expected, strict=True))
    left = model.caches_are_setup() or not model.training
    recipe.stages.runners.training.close()
    place.leave()
    return injected, recovered, wrong, left


@pytest.mark.parametrize("layer_by_layer", [False, True])
def test_answers_survive_running_out_of_memory_at_any_place(tmp_path: Path, layer_by_layer: bool) -> None:
    arguments = tmp_path / "out", free_ports(1)[0], layer_by_layer
    for injected, recovered, wrong, left in run_on_ranks(
        2, generate_failing, *arguments, timeout_s=150, in_group=False
    ):
        assert injected >= PLACES - 1
        assert (recovered, wrong, left) == (injected, 0, False)


RESUMED = ("save_every_n_steps=1", "resume_from_checkpoint=auto", "overwrite_output_dir=False")


def train_until_killed(folder: Path, port: int) -> None:
    """Ends this process without a word once the policy of the second checkpoint is written, but not the value model."""
    os.environ["MASTER_PORT"] = str(port)
    recipe = load_ppo()(ppo_config(folder, *RESUMED))
    recipe.setup()
    save, count = FullModelTorchTuneCheckpointer.save_checkpoint, iter(range(9))

    def save_or_die(*args: Any, **options: Any) -> None:
        if next(count) == 3:  # policy, value model, policy, value model
            os.kill(os.getpid(), signal.SIGKILL)
        save(*args, **options)

    with mock.patch.object(FullModelTorchTuneCheckpointer, "save_checkpoint", save_or_die):
        recipe.train()


def test_a_kill_between_both_models_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    ports = free_ports(3)
    with pytest.raises(RankFailed, match="without a word"):
        run_on_ranks(1, train_until_killed, tmp_path / "killed", ports[0], timeout_s=60, in_group=False)
    names = [path.name for path in (tmp_path / "killed" / "out").glob("*_*") if path.is_dir()]
    assert "step_1" in names
    assert "step_2" not in names
    for case, port in zip(("killed", "whole"), ports[1:], strict=True):
        run_on_ranks(1, train_silently, tmp_path / case, port, timeout_s=60, in_group=False)
    whole, killed = saved(tmp_path / "whole"), saved(tmp_path / "killed")
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


def train_silently(folder: Path, port: int) -> None:
    run_ppo(ppo_config(folder, *RESUMED), port)
