"""What preference training refuses before anything is built, and what the log tells of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf

from tests.unit.tune.settings import NEEDED
from torchtune_adaptive.config.checks import read_full_dpo_settings
from torchtune_adaptive.config.command_line import locate
from torchtune_adaptive.config.keys import AdaptiveConfig, Settings
from torchtune_adaptive.engine.plans import Load
from torchtune_adaptive.engine.reports import StepResult
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.forecast.which_recipe import is_lora, keeps_reference, training_of, trains_on_pairs
from torchtune_adaptive.tune import preference
from torchtune_adaptive.tune.bad_samples import NamedSamples
from torchtune_adaptive.tune.data import check_samples
from torchtune_adaptive.tune.preference import POLICY, PreferenceFigures, build_preference_loss, sums_of_rows
from torchtune_adaptive.tune.samples import PAIR

KEYS = {**NEEDED, "batch_size": 2, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize("loss", ["torchtune.rlhf.loss.DPOLoss", "torchtune.rlhf.loss.RSOLoss"])
def test_losses_of_pairs_are_taken(loss: str) -> None:
    assert build_preference_loss(OmegaConf.create({"loss": {"_component_": loss}})) is not None


@pytest.mark.parametrize("loss", ["torchtune.modules.loss.CEWithChunkedOutputLoss", "torch.nn.MSELoss"])
def test_another_loss_is_refused(loss: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"loss is {loss}, which does not compute .* such as torchtune.rlhf.loss.DPOLoss"
    ):
        build_preference_loss(OmegaConf.create({"loss": {"_component_": loss}}))


def test_a_loss_that_cannot_be_computed_is_told_with_its_arguments() -> None:
    loss = {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": "abc"}
    with pytest.raises(
        ConfigError, match=r"loss is torchtune.rlhf.loss.DPOLoss with beta: 'abc', which does not compute"
    ):
        build_preference_loss(OmegaConf.create({"loss": loss}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("optimizer_in_bwd", True), ("tensor_parallel_dim", 2)],
)
def test_what_is_not_supported_is_refused(key: str, value: object) -> None:
    read_full_dpo_settings(OmegaConf.create(KEYS))
    with pytest.raises(ConfigError, match=f"{key} is .*, which preference training does not support: allowed is"):
        read_full_dpo_settings(OmegaConf.create({**KEYS, key: value}))


def test_a_dataset_for_finetuning_is_refused() -> None:
    cfg = OmegaConf.create({"dataset": {"_component_": "some.dataset"}})
    samples = NamedSamples([{"tokens": [1], "labels": [1]}], PAIR)
    with pytest.raises(
        ConfigError, match=r"dataset is some.dataset, which does not return pairs: its first sample has tokens, labels"
    ):
        check_samples(samples, ["chosen_input_ids"], cfg, "pairs", "preference_dataset")


RESULT = StepResult(
    loss_sum=torch.tensor(6.0),
    target_tokens=60,
    microbatches=3,
    recoveries=0,
    load=Load(tokens=100, padded_tokens=120, most_rows=2, most_tokens=30, cost=120),
    sums={
        name: torch.tensor(value)
        for name, value in {
            "pairs": 12.0,
            "pairs/empty": 0.0,
            "pairs/identical": 0.0,
            "microbatches": 6.0,
            "rewards/chosen": 24.0,
            "rewards/rejected": 6.0,
            "rewards/accuracies": 9.0,
            "log_probs/chosen": -120.0,
            "log_probs/rejected": -240.0,
            "logits/chosen": 50.0,
            "logits/rejected": 100.0,
            "tokens/chosen": 25.0,
            "tokens/rejected": 25.0,
            "padded_logits/chosen": 18.0,
            "padded_logits/rejected": 12.0,
        }.items()
    },
)


def test_figures_are_means_over_pairs() -> None:
    figures = PreferenceFigures(Settings(**KEYS)).figures({POLICY: RESULT})
    assert (figures["rewards/chosen"], figures["rewards/rejected"], figures["rewards/margins"]) == (2.0, 0.5, 1.5)
    assert (figures["rewards/accuracies"], figures["log_probs/rejected"]) == (0.75, -20.0)


def test_logits_are_means_over_tokens_in_another_split_than_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(preference, "say", said.append)
    figures = PreferenceFigures(Settings(**KEYS))
    assert figures.figures({POLICY: RESULT})["logits/chosen"] == 3.0
    assert said == []
    for _ in range(2):
        assert figures.figures({POLICY: replace(RESULT, microbatches=2)})["logits/chosen"] == 2.0
    assert len(said) == 1


def test_logits_are_means_over_tokens_under_a_token_budget_however_a_step_happens_to_be_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preference, "say", lambda _: None)
    figures = PreferenceFigures(Settings(**KEYS, adaptive=AdaptiveConfig(token_budget=700)))
    assert figures.figures({POLICY: RESULT})["logits/chosen"] == 2.0


def told(monkeypatch: pytest.MonkeyPatch, results: list[StepResult]) -> list[str]:
    """What is warned of in these steps, and at the end of two epochs."""
    said: list[str] = []
    monkeypatch.setattr(preference.logger, "warning", lambda text, *values: said.append(text % values))
    figures = PreferenceFigures(Settings(**KEYS))
    for result in results:
        figures.figures({POLICY: result})
    figures.end_epoch()
    figures.end_epoch()
    return said


def test_pairs_of_which_little_is_learned_are_told_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    flaws = {"pairs/identical": torch.tensor(2.0), "pairs/empty": torch.tensor(1.0)}
    flawed = replace(RESULT, sums={**RESULT.sums, **flaws})
    first, count = told(monkeypatch, [RESULT, flawed, RESULT, flawed])
    assert "a pair of the dataset has an answer without any label or two identical answers" in first
    assert count == "of 48 pairs so far, 2 have an answer without any label, 4 have two identical answers"
    assert told(monkeypatch, [RESULT]) == []


def test_one_pair_is_told_in_the_singular(monkeypatch: pytest.MonkeyPatch) -> None:
    flaws = {"pairs": torch.tensor(1.0), "pairs/identical": torch.tensor(1.0), "pairs/empty": torch.tensor(0.0)}
    _, count = told(monkeypatch, [replace(RESULT, sums={**RESULT.sums, **flaws})])
    assert count == "of 1 pair so far, 1 has two identical answers"


@pytest.mark.parametrize("name", ["llama3_1/8B_full_dpo", "llama3_1/8B_lora_dpo", "llama2/7B_lora_dpo"])
def test_a_recipe_is_known_by_the_reference_or_the_loss(name: str) -> None:
    cfg = OmegaConf.load(locate(f"adaptive/{name}"))
    assert trains_on_pairs(cfg)
    assert is_lora(cfg) == ("lora" in name)
    assert keeps_reference(training_of(cfg).read(cfg)[0]) == ("lora" not in name)
    cfg.loss = {"_component_": "torch.nn.CrossEntropyLoss"}
    assert trains_on_pairs(cfg) == ("lora" not in name)


def test_sums_of_rows_one_after_another_are_those_of_each_and_so_are_their_gradients() -> None:
    lengths, weights = [3, 1, 4], torch.tensor([2.0, 5.0, 7.0], dtype=torch.float64)
    ours, theirs = (torch.linspace(0, 1, 8, dtype=torch.float64)[None].requires_grad_() for _ in range(2))
    sums = sums_of_rows(ours, lengths)
    expected = torch.stack([row.sum() for row in theirs[0].split(lengths)])
    assert torch.equal(sums, expected)
    (sums * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
