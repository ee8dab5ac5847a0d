"""Prompts, rollouts cut to measured lengths, and fillers for ranks without samples."""

from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf

from tests.unit.tune.minimal_config import NEEDED
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.rl.rollouts import (
    answer_tokens,
    build_prompts,
    counts_of,
    sequences_of,
    worst_rollout,
)

PROMPT, NEW = 16, 12
WORST = worst_rollout(torch.arange(PROMPT), NEW)


def test_rollout_is_cut_to_the_measured_length_with_the_longest_answer() -> None:
    for length in range(2, PROMPT + NEW + 1):
        cut = WORST.shortened(length)
        assert cut.whole_length == length
        assert cut.length == min(NEW, length - 1)
        assert counts_of([cut]).sum() == cut.length
        assert sequences_of([cut], "cpu").tokens.shape == (1, length)
    for length in range(NEW + 1, PROMPT + NEW + 1):
        generates = WORST.with_shorter_prompt(length)
        assert (generates.padded_length, len(generates.answer)) == (length, NEW)
    assert (WORST.whole_length, WORST.padded_length) == (PROMPT + NEW, PROMPT + NEW)
    assert counts_of([WORST]).all()


def test_filler_tokens_do_not_count() -> None:
    filler = WORST.filler()
    filler.length = 7  # as after generation
    assert not counts_of([filler]).any()
    assert answer_tokens([WORST, filler]) == NEW


MESH: Any = {"dp": SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0)}


def samples_of(tokenizer: Any) -> list[Any]:
    """Component of a dataset."""
    return [{"tokens": tokens, "labels": tokens} for tokens in ([1, 2], [3])]


def test_prompts_are_truncated_to_the_length_of_the_tokenizer() -> None:
    cfg = OmegaConf.create({"dataset": {"_component_": f"{__name__}.samples_of"}})
    dataset: Any = build_prompts(Settings(**NEEDED, config=cfg), SimpleNamespace(max_seq_len=1), MESH).dataset
    assert [dataset[index]["tokens"] for index in range(2)] == [[1], [3]]
