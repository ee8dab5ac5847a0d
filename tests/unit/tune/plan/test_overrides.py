"""What may be changed in a config: every change is one that torchtune's parser and the recipes take."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.tune.plan import overrides
from torchtune_adaptive.tune.plan.overrides import changed, checkpointing, combinations, merged, savers, starts
from torchtune_adaptive.tune.start.catalogue import installed_configs
from torchtune_adaptive.tune.start.command_line import read_command_line

CONFIGS = [name for name in installed_configs() if not (name.startswith("adaptive/demo/") or name.endswith("_ppo"))]
"""Those of PPO are not predicted, so nothing is advised for them."""


def load(name: str, *changes: str) -> DictConfig:
    cfg = OmegaConf.merge(OmegaConf.load(installed_configs()[name]), OmegaConf.from_dotlist([*changes]))
    assert isinstance(cfg, DictConfig)
    return cfg


def as_typed(name: str, *given: str) -> DictConfig:
    with mock.patch.object(sys, "argv", ["recipe", "--config", name, *given]):
        return read_command_line(sys.argv)


@pytest.mark.parametrize("name", CONFIGS[::8])
def test_every_change_means_what_it_means_on_the_command_line(name: str) -> None:
    """And the recipe takes it: `starts` reads its settings as a run does."""
    cfg = load(name)
    single = savers(cfg, world_size=8)
    assert len(single) > 1
    for each in [*single, *combinations(single)]:
        assert changed(cfg, each) == as_typed(name, *each)
        assert starts(changed(cfg, each)) or "fsdp_cpu_offload=True" in each


def test_what_a_config_has_already_is_not_advised() -> None:
    name = "adaptive/llama3_1/8B_full"
    checkpointed = savers(load(name, "enable_activation_checkpointing=True", "compile=True"), 8)
    assert not any("compile=True" in each or each == ("enable_activation_checkpointing=True",) for each in checkpointed)
    plain = savers(load(name, "enable_activation_checkpointing=False"), 8)
    assert ("compile=True",) in plain
    assert ("enable_activation_checkpointing=True",) in plain
    assert ("ac_mode=selective", "ac_option=2") in plain
    assert ("fsdp_reshard_after_forward=True",) in savers(load(name, "fsdp_reshard_after_forward=False"), 8)
    assert ("fsdp_reshard_after_forward=True",) not in savers(load(name, "fsdp_reshard_after_forward=False"), 1)


def test_a_loss_over_all_logits_is_cut_into_chunks() -> None:
    name = "adaptive/llama3_1/8B_full"
    chunked = (f"loss._component_={overrides.CHUNKED}",)
    assert chunked not in savers(load(name), 1)
    assert chunked in savers(load(name, "loss._component_=torch.nn.CrossEntropyLoss"), 1)


def test_adam_in_8_bits_takes_no_key_of_torchs() -> None:
    (eight,) = [each for each in savers(load("adaptive/llama3_1/8B_full"), 1) if "optimizer" in each[0]]
    assert eight == ("optimizer._component_=torchao.optim.AdamW8bit", "~optimizer.fused")


def test_a_smaller_rank_of_lora_keeps_what_adapters_weigh() -> None:
    name = "adaptive/llama3_1/8B_lora"
    changes = [
        each for each in savers(load(name, "model.lora_rank=64", "model.lora_alpha=128"), 1) if "lora" in each[0]
    ]
    assert changes == [("model.lora_rank=8", "model.lora_alpha=16")]
    assert not any("lora" in each[0] for each in savers(load(name, "model.lora_rank=8"), 1))


def test_on_a_cpu_nothing_is_advised_that_needs_a_gpu_or_a_compiler() -> None:
    texts = " ".join(" ".join(each) for each in savers(load("adaptive/llama3_1/8B_full", "device=cpu"), 2))
    for key in ("compile", "offload", "torchao"):
        assert key not in texts


def test_ways_to_checkpoint_exclude_each_other() -> None:
    cfg = load("adaptive/llama3_1/8B_full", "enable_activation_checkpointing=True")
    without, second, everywhere = checkpointing(cfg)
    assert without == ("enable_activation_checkpointing=False",)
    assert second == overrides.EVERY_SECOND_LAYER
    assert everywhere == ()
    selective = changed(cfg, second)
    assert checkpointing(selective) == [("ac_mode=null",), (), ("enable_activation_checkpointing=True", "ac_mode=null")]


def test_of_a_key_that_is_set_twice_the_last_counts() -> None:
    assert merged(("a=1", "~b.c"), ("a=2",)) == ("a=2", "~b.c")


def test_combinations_grow_and_leave_out_what_was_tried_alone() -> None:
    single = [("compile=True",), ("ac_mode=selective", "ac_option=2"), ("enable_activation_checkpointing=True",)]
    both = ("compile=True", "enable_activation_checkpointing=True")
    host = ("fsdp_cpu_offload=True",)
    assert combinations([*single, host]) == [both, (*both, *host)]
    assert combinations([host]) == []
