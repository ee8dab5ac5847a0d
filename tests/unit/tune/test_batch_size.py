"""Journal events of searches, and errors of samples that do not fit."""

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from omegaconf import OmegaConf

from tests.unit.tune.minimal_config import NEEDED
from torchtune_adaptive.config.keys import AdaptiveConfig, Settings
from torchtune_adaptive.errors import OneRowDoesNotFitError, Remedy, SampleTooLargeError
from torchtune_adaptive.tune import batch_size
from torchtune_adaptive.tune.batch_size import check_lengths, worst_sample
from torchtune_adaptive.tune.checked_dataset import CheckedDataset
from torchtune_adaptive.tune.samples import PAIR, TEXT

KIND = dataclasses.replace(PAIR, padded=False)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)


def settings(changed: dict[str, Any] | None = None, **adaptive: Any) -> Settings:
    return Settings(**{**NEEDED, **(changed or {}), "adaptive": AdaptiveConfig(**adaptive)})


def test_row_that_does_not_fit_is_reported_with_its_stage() -> None:
    step, loop = mock.Mock(length=4096, sample={}), mock.Mock()
    step.runner.stage, loop.data.kind, loop.run.settings = "policy", KIND, settings()
    fails = OneRowDoesNotFitError("one row of 256 tokens needs 2", Remedy.MORE_RANKS)
    with (
        mock.patch.object(batch_size, "find_max_batch_size", side_effect=fails),
        pytest.raises(OneRowDoesNotFitError) as error,
    ):
        batch_size.search_rows(loop, step, mock.MagicMock(), most_rows=64)
    assert error.value.fact == "one row of 256 tokens needs 2 (policy; in both answers together)"
    assert error.value.remedies == (Remedy.MORE_RANKS,)


@pytest.mark.parametrize(("asked", "tokenizer", "model"), [(256, 64, None), (64, None, 2048), (None, 128, 64)])
def test_search_measures_the_smallest_of_all_limits(
    asked: int | None, tokenizer: int | None, model: int | None
) -> None:
    dataset = CheckedDataset([TEXT.uniform(1, 30)])
    dataset.most_tokens = model
    data: Any = SimpleNamespace(dataset=dataset, kind=TEXT, packed=False, max_seq_len=tokenizer)
    assert TEXT.length_of(worst_sample(data, asked)) == 64


def too_long(budget: int | str, max_seq_len: int | None = None, **changed: Any) -> str:
    """Return the error for a pair of 984 tokens, of which a microbatch can hold 887."""
    data: Any = SimpleNamespace(dataset=CheckedDataset([KIND.uniform(1, 984)], KIND), kind=KIND, max_seq_len=None)
    cfg = OmegaConf.create({"tokenizer": {"max_seq_len": max_seq_len}})
    with pytest.raises(SampleTooLargeError, match=r"^sample 0 .* 984 tokens .* room for 887") as error:
        check_lengths(settings({**changed, "config": cfg}, token_budget=budget), data, 887)
    return str(error.value)


def test_remedies_for_a_too_long_sample_depend_on_the_limit_and_the_settings() -> None:
    assert too_long(887).endswith("; raise adaptive.token_budget, or lower tokenizer.max_seq_len to 443")
    assert KIND.length_at(443) <= 887 < KIND.length_at(444)
    ignored_by_the_dataset = too_long(887, max_seq_len=300)
    assert "truncates samples to tokenizer.max_seq_len (300)" in ignored_by_the_dataset
    assert "lower tokenizer.max_seq_len" not in ignored_by_the_dataset
    for checkpoints in (True, False):
        by_memory = too_long("auto", enable_activation_checkpointing=checkpoints)
        assert "raise adaptive.token_budget" not in by_memory
        assert ("enable_activation_checkpointing" in by_memory) is not checkpoints
