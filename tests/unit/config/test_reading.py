"""Configs are found and read into frozen values; a component that cannot be built is reported with its key."""

import dataclasses
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.config import keys
from torchtune_adaptive.config.command_line import config_and_overrides, locate, read_config
from torchtune_adaptive.config.components import build, build_section, require_parts
from torchtune_adaptive.config.keys import COUNT, NAMES, NULL, AdaptiveConfig, Rule, read, read_section, setting
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    rows: int = setting(COUNT)
    names: tuple[str, ...] | None = setting(NAMES | NULL, None)


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (keys.BOOL, [True, False], [0, 1, "True", None]),
        (COUNT, [1, 7], [0, -1, 1.0, "1", True, None]),
        (keys.INTEGER, [0, -3], [0.5, "0", False]),
        (keys.SEED, [0, 2**32 - 2**16 - 1], [-1, 2**32 - 1, 10**30, 0.5, "0", False]),
        (keys.NUMBER, [0, -1.5, float("inf")], ["1", True, None]),
        (keys.ABOVE_ZERO, [1, 0.001, float("inf")], [0, -1, float("nan"), "1", True]),
        (keys.TEXT, ["a"], ["", 1, None]),
        (keys.PATH, ["a", "/ü/b c", "\udcff"], ["", None, "a\0b"]),
        (NULL, [None], [0, "", False]),
        (NAMES, [[], ["a", "b"]], ["a", [1], None]),
        (keys.some_of("a", "b"), [["a"], ["b", "a"]], [[], ["c"], ["a", "c"], "a", None]),
        (keys.one_of("a", 1), ["a", 1], ["b", 2, None]),
        (COUNT | NULL, [1, None], [0, ""]),
    ],
    ids=lambda value: value.allowed if isinstance(value, Rule) else None,
)
def test_rule_accepts_good_and_rejects_bad_values(rule: Rule, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not rule.accepts(value)] == []
    assert [value for value in bad if rule.accepts(value)] == []


def test_section_reads_its_keys_and_ignores_others() -> None:
    assert read(Section, {"rows": 3, "other": "x"}) == Section(rows=3, names=None)
    section = read(Section, OmegaConf.create({"rows": 1, "names": ["a", "b"]}))
    assert section.names == ("a", "b"), "a tuple, so that the value is frozen"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rows": "x"}, "model.rows is 'x': allowed is a whole number of at least 1"),
        ({}, "model.rows is missing: set it to a whole number of at least 1"),
    ],
)
def test_error_names_key_section_value_and_allowed_values(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        read(Section, keys, prefix="model.")


@pytest.mark.parametrize("section", [5, "yes", ["recover_from_oom"]])
def test_invalid_section_is_an_error(section: Any) -> None:
    with pytest.raises(ConfigError, match=r"^adaptive is "):
        read_section(AdaptiveConfig, section, "adaptive")


def optimizer(parameters: list[int], lr: float) -> float:
    return lr


def anything(lr: float, **others: Any) -> float:
    return optimizer([], lr, **others)


def fails(lr: float) -> None:
    raise TypeError(f"{lr} is no number")


def fails_below(lr: float) -> None:
    try:
        fails(lr)
    except TypeError as error:
        raise RuntimeError("An error occurred") from error


def message(name: str, **keys: Any) -> str:
    section = OmegaConf.create({"_component_": name if "." in name else f"{__name__}.{name}", **keys})
    with pytest.raises(ConfigError) as caught:
        build_section("optimizer", section, *([[1]] if name == "optimizer" else []))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("fails", {"lr": 3}, "TypeError: 3 is no number"),
        ("fails_below", {"lr": 3}, "RuntimeError: An error occurred (TypeError: 3 is no number)"),
        ("anything", {"lr": 3, "lrr": 4}, "remove it, for example by '~optimizer.lrr' on the command line"),
        ("optimizer", {}, "missing 1 required positional argument: 'lr'"),
        ("builtins.range", {"lr": 3}, "TypeError"),
    ],
)
def test_error_of_a_component_is_shown_with_its_key(name: str, keys: dict[str, Any], expected: str) -> None:
    text = message(name, **keys)
    assert text.startswith("optimizer could not be built from ")
    assert expected in text


@pytest.mark.parametrize("path", [None, 5])
def test_component_without_a_dotted_path_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"^model\._component_ is "):
        build_section("model", OmegaConf.create({"_component_": path}))


def test_list_is_accepted_only_where_several_sections_are_allowed() -> None:
    cfg = OmegaConf.create({"optimizer": ["torch.optim.AdamW"], "dataset": [{"_component_": f"{__name__}.fails"}]})
    with pytest.raises(ConfigError, match=r"^optimizer is .*AdamW"):
        build("optimizer", cfg)
    assert require_parts(cfg, "dataset") == cfg.dataset
