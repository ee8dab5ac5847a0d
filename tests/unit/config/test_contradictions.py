"""A run is told at once of all that its settings contradict, and a device is a GPU in one sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config.checks import (
    read_full_dpo_settings,
    read_full_settings,
    read_lora_dpo_settings,
    read_lora_settings,
)
from torchtune_adaptive.config.keys import on_gpu
from torchtune_adaptive.config.registry import FULL, FULL_DPO, LORA, LORA_DPO, PPO, installed_configs
from torchtune_adaptive.errors import ConfigError, SeveralErrors
from torchtune_adaptive.forecast.which_recipe import training_of
from torchtune_adaptive.rl.settings import read_ppo_settings

OF_FINETUNING = {"precompute_reference": True}
OF_PAIRS = {"precompute_reference": True, "oversize": "truncate"}
KINDS: dict[str, tuple[Callable[[DictConfig], object], str, dict[str, object], str]] = {
    FULL: (read_full_settings, "full", OF_FINETUNING, "finetuning has no reference"),
    LORA: (read_lora_settings, "lora", OF_FINETUNING, "finetuning has no reference"),
    FULL_DPO: (read_full_dpo_settings, "dpo", OF_PAIRS, "adaptive.oversize is truncate"),
    LORA_DPO: (read_lora_dpo_settings, "lora_dpo", OF_PAIRS, "adaptive.oversize is truncate"),
    PPO: (read_ppo_settings, "ppo", OF_FINETUNING, "adaptive.precompute_reference is True"),
}


def demo(name: str) -> DictConfig:
    cfg = OmegaConf.load(installed_configs()[f"adaptive/demo/{name}"])
    assert isinstance(cfg, DictConfig)
    return cfg


@pytest.mark.parametrize("recipe", KINDS)
def test_a_run_names_both_of_two_mistakes(recipe: str) -> None:
    read, name, adaptive, told = KINDS[recipe]
    cfg = demo(name)
    cfg.use_maximum_batch_size = True
    cfg.adaptive = {**adaptive, "token_budget": "auto"}
    with pytest.raises(SeveralErrors) as error:
        read(cfg)
    assert {told in str(each) for each in error.value.errors} == {True, False}
    assert "use_maximum_batch_size is True" in str(error.value)


@pytest.mark.parametrize("recipe", KINDS)
def test_a_config_is_known_by_its_recipe(recipe: str) -> None:
    assert training_of(demo(KINDS[recipe][1])).name == recipe


def test_mistakes_among_the_keys_of_adapters_hide_no_other() -> None:
    cfg = demo("lora")
    cfg.model.lora_rank = 0
    cfg.adaptive = OF_FINETUNING
    with pytest.raises(ConfigError) as error:
        read_lora_settings(cfg)
    assert "model.lora_rank is 0" in str(error.value)
    assert "finetuning has no reference" in str(error.value)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", "cuda", "cuda:1", "xpu", "npu", "npu:3", "mps"])
def test_whatever_is_no_cpu_counts_as_a_gpu(device: str) -> None:
    expected = not device.startswith("cpu")
    assert on_gpu(OmegaConf.create({"device": device})) == expected
    assert on_gpu(replace(read_full_settings(demo("full")), device=device)) == expected
