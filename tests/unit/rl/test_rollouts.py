"""Prompts, rollouts cut to the lengths that are measured, and those that only keep a rank's peers company."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests.unit.tune.settings import NEEDED
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.errors import ConfigError, SampleError
from torchtune_adaptive.rl.rollouts import (
    COUNTS,
    VALUED,
    Rollout,
    answer_tokens,
    build_prompts,
    sequences_of,
    worst_rollout,
)
from torchtune_adaptive.tune.bad_samples import NamedSamples

PROMPT, NEW = 16, 12
WORST = worst_rollout(torch.arange(PROMPT), NEW)


@pytest.mark.parametrize("length", range(2, PROMPT + NEW + 1))
def test_no_rollout_of_a_length_has_a_longer_answer_than_the_one_that_is_measured(length: int) -> None:
    cut = WORST.answered(length)
    assert cut.whole_length == length
    assert cut.length == min(NEW, length - 1)
    assert cut.results[COUNTS].sum() == cut.results[VALUED].sum() == cut.length
    assert sequences_of([cut]).tokens.shape == (1, length)


@pytest.mark.parametrize("length", range(NEW + 1, PROMPT + NEW + 1))
def test_what_is_to_be_generated_has_all_new_tokens_however_short_it_is(length: int) -> None:
    cut = WORST.prompting(length)
    assert (cut.most_length, len(cut.answer)) == (length, NEW)


def test_cutting_leaves_a_rollout_as_it_was() -> None:
    before = {name: found.clone() for name, found in WORST.results.items()}
    WORST.answered(5), WORST.prompting(15)
    assert (WORST.whole_length, WORST.most_length) == (PROMPT + NEW, PROMPT + NEW)
    assert all(torch.equal(WORST.results[name], found) for name, found in before.items())


def test_the_tokens_of_a_filler_count_nothing() -> None:
    filler = WORST.filler()
    assert not filler.results[COUNTS].any()
    assert answer_tokens([filler]) == 0
    assert answer_tokens([WORST, filler]) == NEW
    filler.length = 7  # as after generating
    assert answer_tokens([filler]) == 0
    assert isinstance(filler, Rollout)


def test_a_prompt_of_fractions_is_named_and_not_cut_to_whole_numbers() -> None:
    prompts = NamedSamples([{"tokens": [1, 2]}, {"tokens": [1.5, 2.5]}], labelled=False)
    assert prompts[0]["tokens"] == [1, 2]
    told = r"sample 1 of the dataset \(on rank 0\) has tokens that are not a list of integers \(\[1.5, 2.5\]\)"
    with pytest.raises(SampleError, match=told):
        prompts[1]


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
