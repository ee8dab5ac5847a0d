"""What a token budget refuses, and what it makes of samples that are too long."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from omegaconf import OmegaConf

from torchtune_adaptive.config.keys import Settings, read_adaptive
from torchtune_adaptive.errors import SampleTooLargeError
from torchtune_adaptive.tune.samples import FILLER, INDEX, PAIR, TEXT
from torchtune_adaptive.tune.token_budget import Admission, remedy_for

SETTINGS = Settings(
    device="cpu", dtype="fp32", output_dir="out", batch_size=2, gradient_accumulation_steps=1, epochs=1, shuffle=True
)
JOINED = dataclasses.replace(PAIR, padded=False)
SAMPLE: dict[str, Any] = {INDEX: 7, "tokens": list(range(9)), "labels": [-100, -100, *range(2, 9)]}


def adaptive(**values: Any) -> Any:
    return read_adaptive(OmegaConf.create(values))


def having(settings: Settings = SETTINGS, **values: Any) -> Settings:
    """Settings with these values of `adaptive:`."""
    return dataclasses.replace(settings, adaptive=adaptive(**values))


def admitted(longest: int, oversize: str) -> dict[str, Any]:
    remedy = remedy_for(having(token_budget=64), longest)
    [sample] = Admission(TEXT, longest, oversize, remedy).admit([SAMPLE])
    return sample


@pytest.mark.parametrize("oversize", ["error", "truncate", "skip"])
def test_a_sample_that_fits_is_left_alone(oversize: str) -> None:
    assert admitted(9, oversize) is SAMPLE


def test_a_sample_that_is_too_long_is_an_error_by_default() -> None:
    with pytest.raises(
        SampleTooLargeError,
        match=r"sample 7 of the dataset has 9 tokens, but .* room for 8; "
        r"raise adaptive.token_budget, lower tokenizer.max_seq_len to 8, or .* truncate",
    ):
        admitted(8, "error")


def test_a_pair_without_padding_is_told_in_the_tokens_of_both_answers() -> None:
    pair = {**JOINED.uniform(1, 984), INDEX: 7}
    remedy = remedy_for(having(token_budget=887), JOINED.longest_at(887))
    with pytest.raises(
        SampleTooLargeError,
        match=r"sample 7 of the dataset has 984 tokens in both answers together, but .* room for 887; "
        r"raise adaptive.token_budget, lower tokenizer.max_seq_len to 443, or",
    ):
        Admission(JOINED, 887, "error", remedy).admit([pair])
    assert JOINED.length_at(443) <= 887 < JOINED.length_at(444)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_where_memory_says_how_many_tokens_fit_it_is_memory_that_is_advised(checkpointed: bool) -> None:
    settings = dataclasses.replace(SETTINGS, enable_activation_checkpointing=checkpointed)
    remedy = remedy_for(having(settings, token_budget="auto"), 443)
    assert "adaptive.token_budget" not in remedy
    assert "adaptive.memory_limit" in remedy
    assert "more ranks" in remedy
    assert ("set enable_activation_checkpointing: True" in remedy) is not checkpointed


def test_a_dataset_that_does_not_heed_the_tokenizer_is_not_answered_by_a_larger_tokenizer_limit() -> None:
    cfg = OmegaConf.create({"tokenizer": {"max_seq_len": 300}})
    remedy = remedy_for(having(dataclasses.replace(SETTINGS, config=cfg), token_budget=400), 400)
    assert "use a dataset that, unlike this one, truncates samples to tokenizer.max_seq_len (300)" in remedy
    assert "lower tokenizer.max_seq_len" not in remedy


def test_truncate_keeps_the_beginning() -> None:
    assert admitted(4, "truncate") == {INDEX: 7, "tokens": [0, 1, 2, 3], "labels": [-100, -100, 2, 3]}


def test_skip_leaves_a_sample_that_counts_nothing_in_its_place() -> None:
    assert admitted(4, "skip") == {INDEX: 7, FILLER: True, "tokens": [0, 1], "labels": [-100, -100]}


def test_a_sample_with_images_is_never_cut() -> None:
    image = {**SAMPLE, "encoder_input": {}}
    short = {INDEX: 6, "tokens": [0], "labels": [0]}
    admission = Admission(TEXT, 4, "truncate", "")
    with pytest.raises(SampleTooLargeError, match="sample 7 of the dataset has 9 tokens"):
        admission.admit([short, image, short])


def samples_of_an_epoch(admission: Admission, lengths: Sequence[int]) -> list[int]:
    step = [{"tokens": [1] * length, "labels": [1] * length} for length in lengths]
    steps = (admission.admit(step) for _ in range(2))
    return [len(sample["tokens"]) for step in admission.counting(steps, epoch=0) for sample in step]


@pytest.mark.parametrize(("oversize", "done", "length"), [("skip", "skipped", 2), ("truncate", "truncated", 8)])
def test_how_many_were_changed_is_told_when_the_epoch_is_over(
    oversize: str, done: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("torchtune_adaptive.tune.token_budget.say", said.append)
    admission = Admission(TEXT, 8, oversize, "")
    for _ in range(2):
        assert samples_of_an_epoch(admission, [9, 8, 3]) == 2 * [length, 8, 3]
    assert said == [f"token budget · epoch 0: 2 of 6 samples (33.3 %) were longer than 8 tokens and {done}"] * 2
    samples_of_an_epoch(admission, [8, 3])
    assert len(said) == 2, "nothing to tell"


def test_a_filler_has_no_label_and_leaves_its_sample_as_it_was() -> None:
    before = copy.deepcopy(SAMPLE)
    assert set(dataclasses.replace(TEXT, ignored_label=-1).filler(SAMPLE)["labels"]) == {-1}
    assert before == SAMPLE
    assert TEXT.cut(SAMPLE, 100) == SAMPLE
