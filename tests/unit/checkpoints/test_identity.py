"""What makes a run another one, and in which words that is said."""

from __future__ import annotations

from typing import Any

import pytest

from torchtune_adaptive.checkpoints.identity import difference

MODEL = {"model._component_": "torchtune.models.llama3.llama3"}
UNKNOWN = {"model._component_": "no.such"}
ADAM = {"optimizer._component_": "torch.optim.AdamW"}


@pytest.mark.parametrize(
    ("configured", "saved", "told"),
    [
        ({"seed": 1}, {"seed": 2}, "seed is 1, but was 2"),
        ({"seed": 1}, {}, "seed is 1, but was not set"),
        (MODEL | {"model.attn_dropout": 0.1}, MODEL, "model.attn_dropout is 0.1, but was not set (default 0.0)"),
        (MODEL, MODEL | {"model.attn_dropout": 0.1}, "model.attn_dropout is not set (default 0.0), but was 0.1"),
        (ADAM | {"optimizer.betas": [0, 0]}, ADAM, "optimizer.betas is [0, 0], but was not set (default [0.9, 0.999])"),
        (UNKNOWN | {"model.size": 3}, UNKNOWN, "model.size is 3, but was not set"),
    ],
)
def test_both_values_are_told_as_they_were_given(configured: dict[str, Any], saved: dict[str, Any], told: str) -> None:
    assert difference(configured, saved) == told


def test_weights_are_told_by_their_files_and_by_their_contents_where_these_have_one_name() -> None:
    ours = {"reward weights in b.pt": "2 bytes", "reference weights in c.pt": "3 bytes"}
    theirs = {"reward weights in a.pt": "1 bytes", "reference weights in c.pt": "4 bytes"}
    read = "reward weights are read from b.pt, but were read from a.pt"
    assert difference(ours, theirs) == f"reference weights in c.pt are 3 bytes, but were 4 bytes, and {read}"
    del ours["reference weights in c.pt"], theirs["reference weights in c.pt"]
    assert difference(ours, theirs) == read


@pytest.mark.parametrize(
    ("section", "key", "value"), [(MODEL, "model.attn_dropout", 0.0), (ADAM, "optimizer.betas", [0.9, 0.999])]
)
def test_to_write_a_default_out_changes_nothing(section: dict[str, Any], key: str, value: Any) -> None:
    assert difference(section | {key: value}, section) is None
    assert difference(section, section | {key: value}) is None


def test_all_that_has_changed_is_told_at_once() -> None:
    ours, theirs = (dict.fromkeys("abcd", value) for value in (1, 2))
    told = "a is 1, but was 2, and b is 1, but was 2, and c is 1, but was 2"
    assert difference(ours, theirs) == f"{told}, and 1 more differ"


def test_what_only_splits_an_update_of_ppo_may_change() -> None:
    ours, saved = ({"recipe": "full_ppo", "gradient_accumulation_steps": steps} for steps in (1, 2))
    assert difference(ours, saved) is None
    assert difference(ours | {"seed": 1}, saved | {"seed": 2}) == "seed is 1, but was 2"
    of_finetuning = "gradient_accumulation_steps is 1, but was 2"
    assert difference(ours | {"recipe": "full"}, saved | {"recipe": "full"}) == of_finetuning


def test_another_recipe_is_what_is_told_first() -> None:
    ours = {"batch_size": 4, "recipe": "full"}
    saved = {"batch_size": 2, "frozen weights in demo.pt": "9 bytes", "recipe": "lora"}
    assert difference(ours, saved) == "recipe is 'full', but was 'lora'"
