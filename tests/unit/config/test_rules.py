"""Config sections become validated, frozen values."""

import dataclasses
import re
from typing import Any

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.config import keys
from torchtune_adaptive.config.keys import COUNT, NAMES, NULL, AdaptiveConfig, Rule, read, read_section, setting
from torchtune_adaptive.errors import ConfigError


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


@pytest.mark.parametrize("section", [None, OmegaConf.create({})])
def test_without_an_adaptive_section_all_keys_have_their_defaults(section: Any) -> None:
    assert read_section(AdaptiveConfig, section, "adaptive").recover_from_oom is True


@pytest.mark.parametrize("section", [5, "yes", ["recover_from_oom"]])
def test_invalid_section_is_an_error(section: Any) -> None:
    with pytest.raises(ConfigError, match=r"^adaptive is "):
        read_section(AdaptiveConfig, section, "adaptive")
