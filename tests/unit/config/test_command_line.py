"""All configs of the package and of torchtune are read without an error."""

import runpy
from pathlib import Path

import pytest

from torchtune_adaptive.config.command_line import config_and_overrides, locate, read_config
from torchtune_adaptive.config.registry import RECIPES, NamedConfig, config_files, supported_configs
from torchtune_adaptive.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("config", [*supported_configs()], ids=lambda config: f"{config.recipe}: {config.name}")
def test_every_config_is_read_by_its_recipe(config: NamedConfig) -> None:
    settings, _ = RECIPES[config.recipe].read(read_config(config.path, []))
    assert settings.config.output_dir


def test_mirrored_configs_equal_torchtunes() -> None:
    mirror = runpy.run_path(str(ROOT / "tools" / "mirror_configs.py"))
    assert sum(map(len, mirror["MIRRORED"].values())) > 20
    assert [str(path) for path in mirror["outdated"]()] == []


@pytest.mark.parametrize("words", [("--config", "adaptive/demo/full"), ("--config=adaptive/demo/full",)])
def test_config_is_found_among_its_overrides(words: tuple[str, ...]) -> None:
    path, overrides = config_and_overrides(["batch_size=2", *words, "seed=null"])
    assert path == config_files()["adaptive/demo/full"]
    assert overrides == ["batch_size=2", "seed=null"]
    cfg = read_config(path, overrides)
    assert (cfg.batch_size, cfg.seed) == (2, None)


@pytest.mark.parametrize("name", ["a" * 300, ""], ids=["too long", "a folder"])
def test_path_that_is_no_file_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a file nor a known config"):
        locate(str(tmp_path / name))


def test_component_can_be_removed_like_any_other_key(tmp_path: Path) -> None:
    (path := tmp_path / "a.yaml").write_text("a: {_component_: x.y, b: 1}\nc: 2\nd: {e: 3}\n")
    assert read_config(path, ["~a", "~c"]) == {"d": {"e": 3}}
    with pytest.raises(ConfigError, match="Could not find key f"):
        read_config(path, ["~f"])
