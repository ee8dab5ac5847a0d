"""Components that cannot be built are reported with key and suggestion."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.config.components import build, build_section, require_parts
from torchtune_adaptive.errors import ConfigError

HERE = "tests.unit.config.test_components"


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
    section = OmegaConf.create({"_component_": name if "." in name else f"{HERE}.{name}", **keys})
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
    cfg = OmegaConf.create({"optimizer": ["torch.optim.AdamW"], "dataset": [{"_component_": f"{HERE}.fails"}]})
    with pytest.raises(ConfigError, match=r"^optimizer is .*AdamW"):
        build("optimizer", cfg)
    assert require_parts(cfg, "dataset") == cfg.dataset
