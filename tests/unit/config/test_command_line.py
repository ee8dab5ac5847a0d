"""The configs that come with the package, and torchtune's own: all are read without an error."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torchtune
from omegaconf import DictConfig, OmegaConf
from torchtune._recipe_registry import get_all_recipes

from torchtune_adaptive.config.checks import read_full_settings, read_lora_settings
from torchtune_adaptive.config.command_line import locate
from torchtune_adaptive.config.keys import read_adaptive
from torchtune_adaptive.config.registry import installed_configs
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rl.settings import read_ppo_settings

ROOT = Path(__file__).parents[3]
STOCK_CONFIGS = Path(torchtune.__file__).parent.parent / "recipes" / "configs"
STOCK = {
    f"{recipe.name}: {config.name}": STOCK_CONFIGS / config.file_path
    for recipe in get_all_recipes()
    if recipe.name in ("full_finetune_distributed", "lora_finetune_distributed")
    for config in recipe.configs
}
OURS = installed_configs()


def load(path: Path) -> DictConfig:
    cfg = OmegaConf.load(path)
    assert isinstance(cfg, DictConfig)
    return cfg


def is_lora(cfg: DictConfig) -> bool:
    return "lora_rank" in cfg.get("model", {})


def read_all(cfg: DictConfig) -> None:
    if "policy_model" in cfg:
        read_ppo_settings(cfg)
    elif is_lora(cfg):
        read_lora_settings(cfg)
    else:
        read_full_settings(cfg)


def test_both_kinds_are_among_them() -> None:
    assert {is_lora(load(path)) for path in OURS.values()} == {True, False}
    assert len(STOCK) > 60


@pytest.mark.parametrize("name", OURS)
def test_every_installed_config_is_valid(name: str) -> None:
    cfg = load(OURS[name])
    read_all(cfg)
    read_adaptive(cfg.get("adaptive"))


@pytest.mark.parametrize("name", STOCK)
def test_every_config_of_torchtune_is_valid(name: str) -> None:
    read_all(load(STOCK[name]))


def test_mirrored_configs_have_not_drifted_from_torchtune() -> None:
    mirror = runpy.run_path(str(ROOT / "tools" / "mirror_configs.py"))
    assert sum(map(len, mirror["MIRRORED"].values())) > 20
    assert [str(path) for path in mirror["outdated"]()] == []


def test_a_name_is_found_with_and_without_the_ending() -> None:
    assert locate("adaptive/demo/full") == OURS["adaptive/demo/full"]


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("a: 1")
    assert locate(str(path)) == path


def test_a_directory_is_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a file nor a known config"):
        locate(str(tmp_path))
