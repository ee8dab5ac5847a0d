"""The command that a prediction ends with."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.tune.plan.answers import command
from torchtune_adaptive.tune.plan.keys import PlanSettings
from torchtune_adaptive.tune.start.configs import locate


def told(*given: str, config: str = "dpo", device: str = "cpu", **asked: Any) -> str:
    cfg = OmegaConf.load(locate(f"adaptive/demo/{config}"))
    cfg.device = device
    return command(cfg, PlanSettings(**asked), "NAME", rows=4, given=given)


def test_it_trains_with_what_was_asked_about() -> None:
    given = ("world_size=2", "enable_activation_checkpointing=True", "format=table", "~loss.beta", "dataset.n=[1, 2]")
    assert told(*given, world_size=2) == (
        "tune run --nproc_per_node 2 adaptive_full_dpo_distributed --config NAME "
        "enable_activation_checkpointing=True '~loss.beta' 'dataset.n=[1, 2]' batch_size=4"
    )


def test_of_a_key_that_the_answer_sets_the_answer_counts() -> None:
    assert told("batch_size=64", "epochs=2").endswith(" NAME batch_size=4 epochs=2")


@pytest.mark.parametrize(
    ("device", "limit", "carried"), [("cpu", "18MiB", True), ("cuda", "24GB", False), ("cpu", "h100", False)]
)
def test_a_cpu_is_given_the_limit_that_was_asked_about(device: str, limit: str, carried: bool) -> None:
    command = told(f"memory_limit={limit}", "adaptive.memory_limit=1GiB", device=device, memory_limit=limit)
    assert f" memory_limit={limit}" not in command
    assert f"adaptive.memory_limit={limit if carried else '1GiB'} batch_size=4" in command
