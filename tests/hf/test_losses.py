"""Losses that add up over microbatches, and losses that do not."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from transformers import Trainer

from tests.hf.trainers import STEPS, Run, arguments, collate, difference, failing_in_forward, tiny_llama, train
from torchtune_adaptive.errors import ConfigError, RecoveryUnsupportedError
from torchtune_adaptive.hf import AdaptiveArguments
from torchtune_adaptive.hf.losses import (
    CHECKED_TOKENS,
    FP32_TOLERANCE,
    HALF_TOLERANCE,
    BatchLoss,
    Reduction,
    TwoSamples,
    how_losses_add_up,
)
from torchtune_adaptive.hf.metrics import BatchMetrics
from torchtune_adaptive.hf.samples import Counts

pytestmark = pytest.mark.timeout(300)


def contrast(logits: torch.Tensor) -> torch.Tensor:
    """Compare the rows of a batch."""
    rows = logits.mean(1)
    return -torch.log_softmax(rows @ rows.T, -1).diagonal().mean()


class InTraining(Trainer):
    """Add a contrastive term in training, from a step on."""

    begins_at = 1

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if model.training and self.state.global_step + 1 >= self.begins_at:
            loss = loss + contrast(outputs["logits"])
        return loss


class FromStep12(InTraining):
    begins_at = 12


class SquaredMean(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.model_accepts_loss_kwargs = False
        return super().compute_loss(model, inputs) ** 2


@pytest.mark.parametrize(
    ("base", "options"),
    [(InTraining, {}), (InTraining, {"attention_dropout": 0.2}), (SquaredMean, {})],
    ids=["only in training", "only in training, with dropout", "squared mean"],
)
def test_loss_that_does_not_add_up_trains_like_stock_until_memory_runs_out(
    tmp_path: Path, base: type, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def run(adaptive: AdaptiveArguments | None = None, **settings: Any) -> Run:
        return train(
            tmp_path, adaptive, base=base, model=tiny_llama(**options), arguments=arguments(tmp_path), **settings
        )

    assert difference(run(AdaptiveArguments()), run()) == 0.0
    assert caplog.text.count("training continues without recovery, so an out-of-memory error ends it: the loss of") == 1
    with pytest.raises(RecoveryUnsupportedError, match="which cannot be repeated: the loss of two samples is"):
        run(AdaptiveArguments(), faults=[(2, 40)])
    with pytest.raises(ConfigError, match="so a step cannot be split"):
        run(AdaptiveArguments(token_budget=100))


def test_loss_that_no_longer_adds_up_ends_the_run_only_if_a_step_is_split(tmp_path: Path) -> None:
    def run(adaptive: AdaptiveArguments | None = None, steps: int = 20, **settings: Any) -> Run:
        options = arguments(tmp_path, max_steps=steps, gradient_accumulation_steps=1)
        return train(tmp_path, adaptive, base=FromStep12, arguments=options, **settings)

    assert difference(run(AdaptiveArguments()), run()) == 0.0
    with pytest.raises(RecoveryUnsupportedError, match="out of memory in step 14, and the loss of two samples is"):
        run(AdaptiveArguments(), faults=[(14, 40)])
    with pytest.raises(ConfigError, match=r"the loss of two samples .* \(steps 1 to 1\d may differ from Trainer's\)"):
        run(AdaptiveArguments(token_budget=100))


def test_loss_check_that_runs_out_of_memory_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stock = train(tmp_path, arguments=arguments(tmp_path))
    fails = failing_in_forward(Trainer, 2)
    assert difference(train(tmp_path, AdaptiveArguments(), base=fails, arguments=arguments(tmp_path)), stock) == 0.0
    assert "ran out of memory, so it is skipped" in caplog.text
    again = train(tmp_path, AdaptiveArguments(), base=fails, faults=[(3, 40)], arguments=arguments(tmp_path))
    assert again.column("oom_recoveries")[-1] == 1
    assert difference(again, stock) < 1e-6


def test_loss_check_runs_short_samples_and_only_if_steps_can_be_split(tmp_path: Path) -> None:
    checked: list[tuple[int, ...]] = []

    class Records(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                checked.append(tuple(inputs["input_ids"].shape))
            return super().compute_loss(model, inputs, *args, **kwargs)

    rows = [{"input_ids": [*range(100)] * 2, "labels": [*range(100)] * 2} for _ in range(32)]
    for batch_size, passes in (1, []), (2, [(1, CHECKED_TOKENS), (1, CHECKED_TOKENS), (2, CHECKED_TOKENS)]):
        checked.clear()
        options = arguments(tmp_path, per_device_train_batch_size=batch_size, max_steps=5)
        train(tmp_path, AdaptiveArguments(), base=Records, train_dataset=rows, arguments=options)
        assert checked == passes


def test_model_with_dropout_trains_bitwise_like_stock(tmp_path: Path) -> None:
    def run(adaptive: AdaptiveArguments | None = None) -> Run:
        return train(tmp_path, adaptive, model=tiny_llama(attention_dropout=0.2), arguments=arguments(tmp_path))

    assert difference(run(AdaptiveArguments()), run()) == 0.0


def test_random_numbers_of_a_loss_equal_those_of_stock(tmp_path: Path) -> None:
    class Noisy(Trainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, *args, **kwargs)
            return loss * (1 + torch.rand(())) if model.training else loss

    stock = train(tmp_path, base=Noisy, arguments=arguments(tmp_path))
    assert difference(train(tmp_path, AdaptiveArguments(), base=Noisy, arguments=arguments(tmp_path)), stock) == 0.0


class CountsCalls(Trainer):
    """Its loss has an attribute with a default of the class, and one that becomes a tensor."""

    calls = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.average: Any = 0.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.calls += 1
        self.average = 0.5 * self.average + loss.detach()
        return loss * (0.5 if self.calls > 4 else 1.0) * (1.0 if self.average > 8 else 0.7)


class ChangesATensor(Trainer):
    """Its loss changes a tensor in an attribute in place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.average = torch.zeros(())

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.average.mul_(0.5).add_(loss.detach())
        return loss * (1.0 if self.average > 8 else 0.7)


class KeepsAnAverage(torch.nn.Module):
    """A model that assigns a new tensor to a buffer, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, self.calls = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256), 0
        self.register_buffer("average", torch.zeros(()))

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> dict[str, Any]:
        logits = self.head(self.embedding(input_ids))
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.average, self.calls = self.average + 1, self.calls + 1
        return {"loss": losses * (1 + (self.average > 3)) * (1 + (self.calls > 9))}


@pytest.mark.parametrize("kind", ["trainer", "trainer in place", "model"])
def test_checks_of_a_loss_do_not_count_as_its_calls(tmp_path: Path, kind: str) -> None:
    def run(adaptive: AdaptiveArguments | None = None) -> Run:
        torch.manual_seed(3)
        base = {"trainer": CountsCalls, "trainer in place": ChangesATensor}.get(kind)
        changed: dict[str, Any] = {"base": base} if base else {"model": KeepsAnAverage()}
        return train(tmp_path, adaptive, arguments=arguments(tmp_path, gradient_accumulation_steps=1), **changed)

    stock = run()
    assert difference(run(AdaptiveArguments()), stock) == 0.0


class Normalized(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)
        self.norm = torch.nn.BatchNorm1d(16)

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> dict[str, Any]:
        logits = self.head(self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_batch_normalization_is_refused_and_keeps_its_statistics(tmp_path: Path) -> None:
    model, refused = Normalized(), AdaptiveArguments(token_budget=100)
    with pytest.raises(ConfigError, match="batch normalization"):
        train(tmp_path, refused, model=model, arguments=arguments(tmp_path))
    assert not model.norm.running_mean.any()


class WeightedClasses(Trainer):
    """Its loss is the weighted mean of `CrossEntropyLoss(weight=...)`, where class 2 has another weight."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, -1, :3]
        return torch.nn.functional.cross_entropy(logits, labels, weight=torch.tensor([1.0, 1.0, 9.0]))


def test_weight_of_a_rare_class_is_found_by_the_check(tmp_path: Path) -> None:
    classes = [0, 1] * 5 + [0, 2]
    dataset = [{"input_ids": [*range(n, n + 8)], "labels": each} for n, each in enumerate(classes, 1)]
    changed: dict[str, Any] = {"train_dataset": dataset, "data_collator": collate_classes, "base": WeightedClasses}
    with pytest.raises(ConfigError, match="so a step cannot be split"):
        train(tmp_path, AdaptiveArguments(token_budget=100), arguments=arguments(tmp_path), **changed)


def collate_classes(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([sample[name] for sample in samples]) for name in ("input_ids", "labels")}


class Classes(Trainer):
    """Its loss is a mean over the rows of a batch that have a label."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.model_accepts_loss_kwargs = False
        labels = inputs.pop("labels")
        return torch.nn.functional.cross_entropy(model(**inputs).logits[:, -1, :3], labels)


def test_rows_without_a_label_do_not_count_in_a_split_step(tmp_path: Path) -> None:
    rows = [{"input_ids": [*range(n, n + 8)], "labels": n % 3 if n % 4 else -100} for n in range(1, 97)]
    changed = {"train_dataset": rows, "data_collator": collate_classes, "base": Classes}
    ours = train(tmp_path, AdaptiveArguments(), faults=[(2, 40)], arguments=arguments(tmp_path), **changed)
    assert ours.column("oom_recoveries")[-1] == 1
    assert difference(ours, train(tmp_path, arguments=arguments(tmp_path), **changed)) < 1e-6


class ReadsGradients(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norms: list[torch.Tensor] = []
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self.read)

    def read(self, parameter: torch.Tensor) -> None:
        self.norms.append(parameter.grad.norm())


class LazyModel(KeepsAnAverage):
    """A model that initializes itself in its first forward, and remembers this in an attribute of its class."""

    ready = False

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> dict[str, Any]:
        if not self.ready:
            self.scale, self.ready = 2.0, True
        logits = self.head(self.embedding(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) * self.scale}


def collate_in_place(samples: Any) -> Any:
    longest = max(len(sample["labels"]) for sample in samples)
    for sample in samples:
        sample["labels"] += [-100] * (longest - len(sample["labels"]))
    return collate(samples)


@pytest.mark.parametrize(
    ("changed", "recovers"),
    [
        ({"settings": {"neftune_noise_alpha": 5}}, True),
        ({"base": ReadsGradients}, False),
        ({"data_collator": collate_in_place}, True),
        ({"model": LazyModel}, True),
    ],
    ids=["NEFTune", "hooks that read gradients", "lists padded in place", "lazy attributes"],
)
def test_run_that_stock_finishes_is_finished_with_or_without_recovery(
    tmp_path: Path, changed: dict[str, Any], recovers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def run(adaptive: AdaptiveArguments | None = None) -> Run:
        torch.manual_seed(3)
        given = dict(changed)
        settings = arguments(tmp_path, max_steps=3, **given.pop("settings", {}))
        if "model" in given:
            given["model"] = given["model"]()
        return train(tmp_path, adaptive, arguments=settings, **given)

    assert difference(run(AdaptiveArguments()), run()) == 0.0
    assert ("training continues without recovery" in caplog.text) != recovers


class OwnPadding(Trainer):
    """Its loss ignores the label 0 instead of -100."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.model_accepts_loss_kwargs = False
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


def test_loss_with_its_own_label_for_ignored_tokens_trains_like_stock(tmp_path: Path) -> None:
    def run(adaptive: AdaptiveArguments | None = None) -> Run:
        dataset = [{"input_ids": row, "labels": row} for row in ([*range(n, n + 16)] for n in range(1, 73))]
        return train(tmp_path, adaptive, base=OwnPadding, train_dataset=dataset, arguments=arguments(tmp_path))

    stock = run()
    assert difference(run(AdaptiveArguments()), stock) < 1e-6


class NotANumber(Trainer):
    """Its loss is NaN from a step on."""

    begins_at = 1

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, **kwargs)
        return loss * (math.nan if self.state.global_step + 1 >= self.begins_at else 1)


class NotANumberFromStep3(NotANumber):
    begins_at = 3


@pytest.mark.parametrize("base", [NotANumber, NotANumberFromStep3])
def test_run_with_losses_that_are_nan_continues_like_stock(base: type, tmp_path: Path) -> None:
    run = train(tmp_path, AdaptiveArguments(), base=base, arguments=arguments(tmp_path))
    assert len(run.log) == STEPS


def two(both: float, first: float = 4.0, second: float = 2.0) -> TwoSamples:
    one, other = BatchLoss(first, Counts(1, 2, 1)), BatchLoss(second, Counts(1, 10, 9))
    return TwoSamples(BatchLoss(both, Counts.total([one.counts, other.counts])), one, other)


@pytest.mark.parametrize(
    ("both", "reduction"),
    [
        (6.0, Reduction.SUM),
        (3.0, Reduction.MEAN_OF_ROWS),
        (28 / 12, Reduction.MEAN_OF_LABELS),
        (22 / 10, Reduction.MEAN_OF_NEXT_TOKENS),
        (2.5, None),
        (22 / 10 * 1.001, None),
    ],
)
def test_reduction_is_determined_from_the_losses_of_two_samples(both: float, reduction: Reduction | None) -> None:
    assert how_losses_add_up([two(both)], shifts_labels=True, tolerance=FP32_TOLERANCE) is reduction


def test_metrics_of_a_batch_without_labels_do_not_shift_those_of_later_batches() -> None:
    """A microbatch of which no row counts is a filler, and its metrics are dropped."""
    trainer: Any = type("Trainer", (), {"_metrics": {"train": defaultdict(list)}})()
    metrics, logged = BatchMetrics(trainer, "train"), trainer._metrics["train"]
    for batch, rows, value in (0, 0, 9.0), (1, 2, 3.0), (1, 1, 6.0):
        with metrics.of_microbatch(batch, rows, {}):
            logged["reward"].append(value)
            logged["max_reward"].append(value)
    metrics.end_step(batches=2)
    assert [len(each) for each in metrics._complete] == [0, 2]
    metrics.publish()
    assert dict(logged) == {"reward": [4.0], "max_reward": [6.0]}


def test_loss_that_adds_up_on_only_one_rank_is_refused() -> None:
    assert how_losses_add_up([two(6.0), two(7.0)], shifts_labels=True, tolerance=HALF_TOLERANCE) is None


def test_equal_losses_count_as_a_mean_over_tokens() -> None:
    equal = two(2.0, first=2.0, second=2.0)
    assert how_losses_add_up([equal], shifts_labels=True, tolerance=FP32_TOLERANCE) is Reduction.MEAN_OF_NEXT_TOKENS


def test_rounding_of_a_small_loss_is_compared_with_earlier_losses() -> None:
    rounded = two(0.0062, first=0.004, second=0.002)
    assert how_losses_add_up([rounded], shifts_labels=True, tolerance=HALF_TOLERANCE) is None
    assert how_losses_add_up([rounded], shifts_labels=True, tolerance=HALF_TOLERANCE, scale=2.0) is not None
