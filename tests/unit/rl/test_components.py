"""Prompts that nothing can be generated from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.unit.tune.settings import NEEDED
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.errors import ConfigError, SampleError
from torchtune_adaptive.rl.components import build_prompts

MESH: Any = {"dp": SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)}


def samples_of(tokenizer: Any, key: str = "tokens") -> list[Any]:
    """Component of a dataset whose last sample is empty."""
    return [{key: tokens, "labels": tokens} for tokens in ([1, 2], [3], [])]


def build(*, listed: bool = False, **arguments: str) -> Any:
    section = {"_component_": f"{__name__}.samples_of", **arguments}
    cfg = OmegaConf.create({"dataset": [section] if listed else section})
    return build_prompts(Settings(**NEEDED, config=cfg), SimpleNamespace(max_seq_len=8), MESH).dataset


def test_a_prompt_without_tokens_is_named() -> None:
    dataset = build()
    assert dataset[1]["tokens"] == [3]
    with pytest.raises(SampleError, match=r"^sample 2 of the dataset \(on rank 0\) has no tokens, .* remove it"):
        dataset[2]


def test_what_has_no_prompts_is_told_by_its_keys() -> None:
    with pytest.raises(ConfigError, match="its first sample has words, labels, but needs tokens"):
        build(key="words")
    with pytest.raises(ConfigError, match="which does not return prompts: its first sample has words, labels"):
        build(listed=True, key="words")
