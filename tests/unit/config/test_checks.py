"""Unused keys and contradictions are refused together, before any component is built; remedies name keys."""

import dataclasses
import logging
import pickle
import re
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.command_line import read_config
from torchtune_adaptive.config.keys import AdaptiveConfig
from torchtune_adaptive.config.registry import FULL, FULL_DPO, LORA, LORA_DPO, PPO, Recipe, config_files
from torchtune_adaptive.config.remedies import KEYS, KEYS_IN_PPO
from torchtune_adaptive.errors import BETWEEN_ERRORS, AdaptiveError, ConfigError, LimitExhaustedError, Remedy


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("batch_szie", "batch_size"),
        ("use_max_batch_size", "use_maximum_batch_size"),
        ("grad_accumulation_steps", "gradient_accumulation_steps"),
        ("epoch", "epochs"),
        ("adaptve", "adaptive"),
        *((field.name, f"adaptive.{field.name}") for field in dataclasses.fields(AdaptiveConfig)),
    ],
)
def test_key_that_is_misspelled_or_at_the_wrong_level_is_an_error_with_the_intended_key(slip: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{slip} .* did you mean {re.escape(meant)}\?"):
        check_keys(OmegaConf.create({"batch_size": 2, slip: 1}), log=True)


@pytest.mark.parametrize("key", ["my_note", "batch_size_test", "ppo_batch_size", "low_cpu_ram"])
def test_custom_key_is_reported_once(key: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torchtune_adaptive"):
        check_keys(OmegaConf.create({"batch_size": 2, key: 1}), log=True)
        check_keys(OmegaConf.create({"batch_size": 2, key: 1}), log=False)
    assert caplog.messages == [f"ignored config keys: {key}"]


def test_all_wrong_keys_are_reported_together() -> None:
    wrong = ["search", "batch_szie", "epoch"]
    with pytest.raises(ConfigError) as caught:
        check_keys(OmegaConf.create(dict.fromkeys(wrong, 2)), log=True)
    assert [error.split()[0] for error in str(caught.value).split(BETWEEN_ERRORS)] == wrong


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


def demo(recipe: Recipe, *overrides: str, **adaptive: object) -> DictConfig:
    name = {FULL: "full", LORA: "lora", FULL_DPO: "dpo", LORA_DPO: "lora_dpo", PPO: "ppo"}[recipe]
    cfg = read_config(config_files()[f"adaptive/demo/{name}"], overrides)
    cfg.adaptive = {**adaptive}
    return cfg


def problems(recipe: Recipe, cfg: DictConfig) -> str:
    try:
        recipe.read(cfg)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("recipe", "overrides", "adaptive", "problem"),
    [
        (FULL, "use_maximum_batch_size=True", BUDGET, "use_maximum_batch_size is True and adaptive.token_budget is"),
        (FULL, "optimizer_in_bwd=True", BUDGET, "set optimizer_in_bwd: False or adaptive.token_budget: null"),
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
    recipe: Recipe, overrides: str, adaptive: dict[str, object], problem: str
) -> None:
    cfg = demo(recipe, "use_maximum_batch_size=False", *overrides.split(), **adaptive)
    assert problem in problems(recipe, cfg)
    assert problem not in problems(recipe, demo(recipe, "use_maximum_batch_size=False"))


@pytest.mark.parametrize("recipe", [FULL, LORA, FULL_DPO, LORA_DPO, PPO], ids=lambda recipe: recipe.name)
def test_all_contradictions_are_reported_together(recipe: Recipe) -> None:
    cfg = demo(recipe, "use_maximum_batch_size=True", token_budget="auto", max_batch_size=4)
    with pytest.raises(ConfigError) as caught:
        recipe.read(cfg)
    message = [error.split()[0] for error in str(caught.value).split(BETWEEN_ERRORS)]
    assert message == ["adaptive.max_batch_size", "use_maximum_batch_size"]


def test_errors_in_several_places_are_reported_together() -> None:
    message = problems(LORA, demo(LORA, "epochs=0", "model.lora_rank=0", "tokenizer.max_seq_len=-1", search="x"))
    for part in ("epochs is 0", "model.lora_rank is 0", "max_seq_len is -1", "adaptive.search is"):
        assert part in message


FACT = "a microbatch of 1 row of 512 tokens does not fit and cannot be made smaller"
EXHAUSTED = LimitExhaustedError(FACT, Remedy.SHORTER_SAMPLES, Remedy.CHECKPOINT_ACTIVATIONS, Remedy.MORE_RANKS)


def test_every_remedy_has_a_text() -> None:
    assert set(KEYS) == set(KEYS_IN_PPO) == set(Remedy)


def test_library_names_arguments_and_recipes_name_keys() -> None:
    assert str(EXHAUSTED) == f"{FACT}; use shorter samples, checkpoint activations, or train on more ranks"
    assert EXHAUSTED.in_words(KEYS) == (
        f"{FACT}; lower tokenizer.max_seq_len (and adaptive.sequence_length if set), "
        "set enable_activation_checkpointing: True, or train on more ranks"
    )
    assert "lower max_generated_tokens or tokenizer.max_seq_len" in EXHAUSTED.in_words(KEYS_IN_PPO)


def test_error_keeps_its_remedies_when_pickled() -> None:
    sent: AdaptiveError = pickle.loads(pickle.dumps(EXHAUSTED))
    assert isinstance(sent, LimitExhaustedError)
    assert sent.in_words(KEYS) == EXHAUSTED.in_words(KEYS)
