"""Differences that make a run another run, and their messages."""

from typing import Any

import pytest

from torchtune_adaptive.checkpoints.identity import difference


@pytest.mark.parametrize(
    ("configured", "saved", "message"),
    [
        ({"seed": 1}, {"seed": 2}, "seed is 1, but was 2"),
        ({"seed": 1}, {}, "seed is 1, but was not set"),
        ({}, {"model.attn_dropout": 0.1}, "model.attn_dropout is not set, but was 0.1"),
    ],
)
def test_both_values_are_shown_as_given(configured: dict[str, Any], saved: dict[str, Any], message: str) -> None:
    assert difference(configured, saved) == message


def test_another_recipe_is_the_only_reported_change() -> None:
    ours = {"batch_size": 4, "recipe": "full"}
    saved = {"batch_size": 2, "model.lora_rank": 9, "recipe": "lora"}
    assert difference(ours, saved) == "recipe is 'full', but was 'lora'"
