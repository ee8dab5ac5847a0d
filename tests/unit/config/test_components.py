"""Components that cannot be built are reported with key and suggestion."""

from functools import partial
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from torchtune_adaptive.config.components import build, build_section, require_parts
from torchtune_adaptive.errors import ConfigError

HERE = "tests.unit.config.test_components"


def optimizer(parameters: list[int], lr: float, betas: Any = None, *, weight_decay: float = 0) -> tuple[float, Any]:
    return lr, betas


def anything(lr: float, **others: Any) -> float:
    return optimizer([], lr, **others)[0]


def fails(lr: float) -> None:
    raise TypeError(f"{lr} is no number")


def fails_below(lr: float) -> None:
    try:
        fails(lr)
    except TypeError as error:
        raise RuntimeError("An error occurred") from error


bound = partial(optimizer, betas=3)


def message(name: str, **keys: Any) -> str:
    section = OmegaConf.create({"_component_": name if name is None or "." in name else f"{HERE}.{name}", **keys})
    with pytest.raises(ConfigError) as caught:
        build_section("optimizer", section, *([[1]] if name in ("optimizer", "bound") else []))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("optimizer", {"lr": 1, "lrr": 2}, "optimizer.lrr: optimizer has no such argument; did you mean lr?"),
        (
            "optimizer",
            {"lr": 1, "beta": 2, "weight": 3},
            "optimizer.beta: optimizer has no such argument; did you mean betas?; "
            "optimizer.weight: optimizer has no such argument; did you mean weight_decay?",
        ),
        (
            "optimizer",
            {"lr": 1, "colour": 2},
            "optimizer.colour: optimizer has no such argument; remove it; allowed: lr, betas, weight_decay",
        ),
        ("optimizer", {}, "optimizer.lr is missing: optimizer requires it"),
        (
            "bound",
            {"lrr": 2},
            "optimizer.lr is missing: bound requires it; optimizer.lrr: bound has no such argument; did you mean lr?",
        ),
        ("anything", {}, "optimizer.lr is missing: anything requires it"),
    ],
)
def test_key_that_does_not_fit_the_signature_is_named(name: str, keys: dict[str, Any], expected: str) -> None:
    assert message(name, **keys) == expected


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("fails", {"lr": 3}, "TypeError: 3 is no number"),
        ("fails_below", {"lr": 3}, "RuntimeError: An error occurred (TypeError: 3 is no number)"),
        ("anything", {"lr": 3, "lrr": 4}, "unexpected keyword argument 'lrr'"),
        ("builtins.range", {"lr": 3}, "TypeError"),
    ],
)
def test_error_not_explained_by_the_signature_is_shown_as_raised(
    name: str, keys: dict[str, Any], expected: str
) -> None:
    text = message(name, **keys)
    assert text.startswith("optimizer could not be built from ")
    assert expected in text


@pytest.mark.parametrize(
    ("component", "key", "value", "expected"),
    [
        ("torch.optim.AdamW", "lr", "3e-3", "optimizer.lr is '3e-3', but AdamW takes float | Tensor"),
        ("torch.optim.AdamW", "lr", None, "optimizer.lr is null, but AdamW takes float | Tensor"),
        ("torch.optim.AdamW", "weight_decay", "abc", "optimizer.weight_decay is 'abc', but AdamW takes float"),
        ("torch.optim.AdamW", "betas", [0.9], "optimizer.betas is [0.9], but AdamW takes 2 values"),
        ("torchao.optim.AdamW8bit", "lr", "3e-3", "optimizer.lr is '3e-3', but AdamW8bit takes float"),
    ],
)
def test_value_of_the_wrong_type_is_named_by_its_key(component: str, key: str, value: Any, expected: str) -> None:
    section = OmegaConf.create({"_component_": component, key: value})
    with pytest.raises(ConfigError) as caught:
        build_section("optimizer", section, [torch.nn.Parameter(torch.zeros(1))])
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(("path", "shown"), [(None, "null"), (5, "5")])
def test_component_without_a_dotted_path_is_refused(path: Any, shown: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\._component_ is {shown}: allowed is the dotted path"):
        build_section("model", OmegaConf.create({"_component_": path}))


def test_list_is_accepted_only_where_several_sections_are_allowed() -> None:
    cfg = OmegaConf.create({"optimizer": ["torch.optim.AdamW"], "dataset": [{"_component_": f"{HERE}.fails"}]})
    with pytest.raises(ConfigError, match=r"^optimizer is .*AdamW.*: allowed is a section with a _component_"):
        build("optimizer", cfg)
    assert require_parts(cfg, "dataset") == cfg.dataset
