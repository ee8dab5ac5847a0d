"""Keys that nothing reads."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.keys import AdaptiveConfig
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.forecast.keys import PlanSettings


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("batch_szie", "batch_size"),
        ("use_max_batch_size", "use_maximum_batch_size"),
        ("grad_accumulation_steps", "gradient_accumulation_steps"),
        ("epoch", "epochs"),
        ("adaptve", "adaptive"),
        ("lr_schedular", "lr_scheduler"),
    ],
)
def test_a_slip_is_an_error_that_names_what_was_meant(slip: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{slip} is not a known key: did you mean {meant}\\? If it is your own key"):
        check_keys(OmegaConf.create({slip: 1}), aloud=True)


def test_a_slip_in_a_key_of_the_plan_is_one_too() -> None:
    with pytest.raises(ConfigError, match=r"did you mean world_size\?"):
        check_keys(OmegaConf.create({"world_szie": 8}), ["world_size"], aloud=True)


@pytest.mark.parametrize("key", ["my_note", "batch_size_val", "ppo_batch_size", "low_cpu_ram"])
def test_a_name_of_its_own_is_told_of_once(key: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torchtune_adaptive"):
        check_keys(OmegaConf.create({"batch_size": 2, key: 1}), aloud=True)
        check_keys(OmegaConf.create({"batch_size": 2, key: 1}), aloud=False)
    assert caplog.messages == [f"ignored config keys: {key}"]


def test_a_key_that_others_are_made_from_is_read(caplog: pytest.LogCaptureFixture) -> None:
    cfg = OmegaConf.create({"output": "runs", "output_dir": "${output}/mine"})
    with caplog.at_level(logging.INFO, logger="torchtune_adaptive"):
        check_keys(cfg, aloud=True)
    assert caplog.messages == []


PLAN_KEYS = [field.name for field in dataclasses.fields(PlanSettings)]
OURS = [field.name for field in dataclasses.fields(AdaptiveConfig)]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("parent", ["", "training.", "training.memory."])
def test_a_key_of_the_section_in_another_place_is_an_error_that_names_its_own(parent: str, name: str) -> None:
    cfg = OmegaConf.create({"batch_size": 2})
    OmegaConf.update(cfg, f"{parent}{name}", 1)
    with pytest.raises(ConfigError, match=rf"^{parent}{name} has no effect here; did you mean adaptive\.{name}\? "):
        check_keys(cfg, aloud=False)


def test_all_misplaced_keys_are_named_at_once() -> None:
    cfg = OmegaConf.create({"search": "binary", "training": {"regrow_after": 3, "mine": 1}})
    message = (
        r"^search and training\.regrow_after have no effect here; did you mean adaptive\.search and "
        r"adaptive\.regrow_after\? Rename your own keys$"
    )
    with pytest.raises(ConfigError, match=message):
        check_keys(cfg, aloud=False)


def test_a_key_of_the_recipe_in_the_section_is_sent_to_its_own_place() -> None:
    cfg = OmegaConf.create({"adaptive": {"data_parallel_replicate_dim": 2, "epochs": 1, "memory_limit": "8GiB"}})
    with pytest.raises(ConfigError) as caught:
        check_keys(cfg, ["memory_limit"], aloud=True)
    assert str(caught.value) == (
        "adaptive.data_parallel_replicate_dim and adaptive.epochs have no effect here: move "
        "data_parallel_replicate_dim and epochs out of adaptive"
    )


def test_a_key_of_the_plan_is_the_plans_where_it_is_one_of_the_section_too() -> None:
    check_keys(OmegaConf.create({"memory_limit": "h100", "sequence_length": 512}), PLAN_KEYS, aloud=False)
    with pytest.raises(ConfigError, match=r"did you mean adaptive\.search\?"):
        check_keys(OmegaConf.create({"search": "static"}), PLAN_KEYS, aloud=False)


@pytest.mark.parametrize(
    "cfg",
    [
        {"dataset": {"_component_": "mine.pairs", "search": "bm25", "sequence_length": 8}},
        {"reward": {"_component_": "mine.Reward", "memory_limit": 3}},
        {"sequence_length": 512, "tokenizer": {"_component_": "mine.Tokenizer", "max_seq_len": "${sequence_length}"}},
        {"sizes": {"search": 7}, "dataset": {"_component_": "mine.pairs", "hits": "${sizes.search}"}},
        {"limit": "8GiB", "adaptive": {"memory_limit": "${limit}", "search": "binary"}},
        {"training": None},
        {"training": ["search"]},
    ],
)
def test_what_a_component_or_a_reference_reads_is_the_users_own(cfg: dict[str, Any]) -> None:
    check_keys(OmegaConf.create(cfg), aloud=False)
