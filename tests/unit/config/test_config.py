"""Configs are found and read into frozen values. Unused keys, contradictions and components that cannot be built are
reported together, before training; remedies name keys.
"""

import dataclasses
import logging
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config import checks, keys
from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.command_line import locate, read_config
from torchtune_adaptive.config.components import build, build_section
from torchtune_adaptive.config.keys import (
    COUNT,
    NAMES,
    NULL,
    REMEDIES,
    AdaptiveConfig,
    Rule,
    read_section,
)
from torchtune_adaptive.config.registry import (
    FULL,
    FULL_DPO,
    LORA,
    LORA_DPO,
    PPO,
    NamedConfig,
    config_files,
    supported_configs,
)
from torchtune_adaptive.errors import BETWEEN_ERRORS, AdaptiveError, ConfigError, LimitExhaustedError, Remedy
from torchtune_adaptive.rl.settings import REMEDIES_IN_PPO, read_ppo_settings

ROOT = Path(__file__).parents[3]
READERS = {
    FULL: checks.read_full_settings,
    LORA: checks.read_lora_settings,
    FULL_DPO: partial(
        checks.read_full_settings, training="preference training", not_supported=checks.ONLY_FOR_FULL_FINETUNING
    ),
    LORA_DPO: checks.read_lora_settings,
    PPO: read_ppo_settings,
}


@pytest.mark.parametrize("config", [*supported_configs()], ids=lambda config: f"{config.recipe}: {config.name}")
def test_every_config_is_read_by_its_recipe(config: NamedConfig) -> None:
    settings = READERS[config.recipe](read_config(config.path, []))
    common = settings[0] if isinstance(settings, tuple) else settings
    assert common.config.output_dir


@pytest.mark.parametrize("name", ["a" * 300, ""], ids=["too long", "a folder"])
def test_path_that_is_no_file_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a file nor a known config"):
        locate(str(tmp_path / name))


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


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("fails", {"lr": 3}, "TypeError: 3 is no number"),
        ("fails_below", {"lr": 3}, "RuntimeError: An error occurred (TypeError: 3 is no number)"),
        ("anything", {"lr": 3, "lrr": 4}, "got an unexpected keyword argument 'lrr'"),
        ("optimizer", {}, "missing 1 required positional argument: 'lr'"),
        ("builtins.range", {"lr": 3}, "TypeError"),
    ],
)
def test_error_of_a_component_is_shown_with_its_key(name: str, keys: dict[str, Any], expected: str) -> None:
    section = OmegaConf.create({"_component_": name if "." in name else f"{__name__}.{name}", **keys})
    with pytest.raises(ConfigError, match=r"^optimizer could not be built from ") as caught:
        build_section("optimizer", section, *([[1]] if name == "optimizer" else []))
    assert expected in str(caught.value)


@pytest.mark.parametrize("path", [None, 5])
def test_component_without_a_dotted_path_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match=r"^model\._component_ is "):
        build_section("model", OmegaConf.create({"_component_": path}))


def test_list_is_refused_where_one_section_is_allowed() -> None:
    cfg = OmegaConf.create({"optimizer": ["torch.optim.AdamW"]})
    with pytest.raises(ConfigError, match=r"^optimizer is .*AdamW"):
        build("optimizer", cfg)


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("batch_szie", "batch_size"),
        ("use_max_batch_size", "use_maximum_batch_size"),
        ("grad_accumulation_steps", "gradient_accumulation_steps"),
        ("epoch", "epochs"),
        ("adaptve", "adaptive"),
        ("adaptive.use_maximum_batch_size", "use_maximum_batch_size"),
        *((field.name, f"adaptive.{field.name}") for field in dataclasses.fields(AdaptiveConfig)),
    ],
)
def test_key_that_is_misspelled_or_at_the_wrong_level_is_an_error_with_the_intended_key(slip: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{slip} .* did you mean {re.escape(meant)}\?"):
        check_keys(OmegaConf.from_dotlist(["batch_size=2", f"{slip}=1"]), log=True)


@pytest.mark.parametrize("key", ["my_note", "batch_size_test", "ppo_batch_size", "low_cpu_ram"])
def test_custom_key_is_reported_once(key: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torchtune_adaptive"):
        check_keys(OmegaConf.create({"batch_size": 2, key: 1}), log=True)
        check_keys(OmegaConf.create({"batch_size": 2, key: 1}), log=False)
    assert caplog.messages == [f"ignored config keys: {key}"]


@pytest.mark.parametrize(
    "cfg",
    [
        {"dataset": {"_component_": "mine.pairs", "search": "bm25", "sequence_length": 8}},
        {"sequence_length": 512, "tokenizer": {"_component_": "mine.Tokenizer", "max_seq_len": "${sequence_length}"}},
        {"sizes": {"search": 7}, "dataset": {"_component_": "mine.pairs", "hits": "${sizes.search}"}},
        {"limit": "8GiB", "adaptive": {"memory_limit": "${limit}", "search": "binary"}},
        {"training": {"search": 7}},
    ],
)
def test_keys_of_components_and_references_are_not_checked(cfg: dict[str, Any]) -> None:
    check_keys(OmegaConf.create(cfg), log=False)


BUDGET = {"token_budget": 4096}
"""Under `adaptive:`."""
SEARCHES_IN_BACKWARD = "optimizer_in_bwd=True use_maximum_batch_size=True batch_size=8 gradient_accumulation_steps=1"


def demo(recipe: str, *overrides: str, **adaptive: object) -> DictConfig:
    name = {FULL: "full", LORA: "lora", FULL_DPO: "dpo", LORA_DPO: "lora_dpo", PPO: "ppo"}[recipe]
    cfg = read_config(config_files()[f"adaptive/demo/{name}"], overrides)
    cfg.adaptive = {**adaptive}
    return cfg


def problems(recipe: str, cfg: DictConfig) -> str:
    try:
        READERS[recipe](cfg)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("recipe", "overrides", "adaptive", "problem"),
    [
        (FULL, "use_maximum_batch_size=True", BUDGET, "use_maximum_batch_size is True and adaptive.token_budget is"),
        (FULL, "optimizer_in_bwd=True", BUDGET, "set optimizer_in_bwd: False or adaptive.token_budget: null"),
        (
            FULL,
            SEARCHES_IN_BACKWARD,
            {"max_batch_size": 4},
            "optimizer_in_bwd is True, so the batch_size of 8 rows must",
        ),
        (FULL, "", {**BUDGET, "max_batch_size": 4}, "max_batch_size is 4 and adaptive.token_budget is 4096"),
        (FULL, "fsdp_cpu_offload=True", {}, "fsdp_cpu_offload is True"),
        (FULL, "run_val_every_n_steps=2", {}, "run_val_every_n_steps is 2, but dataset_val is missing"),
        (FULL, "ac_mode=selective", {}, "ac_mode is selective, but ac_option is null"),
        (LORA, "tensor_parallel_dim=2", {}, "tensor_parallel_dim is 2"),
        (FULL_DPO, "tensor_parallel_dim=2", {}, "tensor_parallel_dim is 2"),
        (FULL_DPO, "optimizer_in_bwd=True", {}, "optimizer_in_bwd is True"),
        (FULL, "", {"search": "binary", "epochs": 1}, "adaptive.epochs is not a known key"),
    ],
)
def test_contradictions_with_other_keys_or_the_recipe_are_refused(
    recipe: str, overrides: str, adaptive: dict[str, object], problem: str
) -> None:
    cfg = demo(recipe, "use_maximum_batch_size=False", *overrides.split(), **adaptive)
    assert problem in problems(recipe, cfg)
    assert problem not in problems(recipe, demo(recipe, "use_maximum_batch_size=False"))


@pytest.mark.parametrize("recipe", [FULL, LORA, FULL_DPO, LORA_DPO, PPO])
def test_all_contradictions_are_reported_together(recipe: str) -> None:
    cfg = demo(recipe, "use_maximum_batch_size=True", token_budget="auto", max_batch_size=4)
    errors = problems(recipe, cfg).split(BETWEEN_ERRORS)
    assert [error.split()[0] for error in errors] == ["adaptive.max_batch_size", "use_maximum_batch_size"]


def test_errors_in_several_places_are_reported_together() -> None:
    message = problems(LORA, demo(LORA, "epochs=0", "model.lora_rank=0", "tokenizer.max_seq_len=-1", search="x"))
    for part in ("epochs is 0", "model.lora_rank is 0", "max_seq_len is -1", "adaptive.search is"):
        assert part in message


FACT = "a microbatch of 1 row of 512 tokens does not fit and cannot be made smaller"
EXHAUSTED = LimitExhaustedError(FACT, Remedy.SHORTER_SAMPLES, Remedy.CHECKPOINT_ACTIVATIONS, Remedy.MORE_RANKS)


def test_every_remedy_has_a_text() -> None:
    assert set(REMEDIES) == set(REMEDIES_IN_PPO) == set(Remedy)


def test_library_names_arguments_and_recipes_name_keys() -> None:
    assert str(EXHAUSTED) == f"{FACT}; use shorter samples, checkpoint activations, or train on more ranks"
    assert EXHAUSTED.in_words(REMEDIES) == (
        f"{FACT}; lower tokenizer.max_seq_len (and adaptive.sequence_length if set), "
        "set enable_activation_checkpointing: True, or train on more ranks"
    )
    assert "lower max_generated_tokens or tokenizer.max_seq_len" in EXHAUSTED.in_words(REMEDIES_IN_PPO)


def test_error_keeps_its_remedies_when_pickled() -> None:
    sent: AdaptiveError = pickle.loads(pickle.dumps(EXHAUSTED))
    assert isinstance(sent, LimitExhaustedError)
    assert sent.in_words(REMEDIES) == EXHAUSTED.in_words(REMEDIES)
