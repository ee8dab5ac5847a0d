"""Evaluations that run out of memory, with and without the mixin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import Trainer, set_seed
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.hf.trainers import (
    RANKS,
    Counting,
    Means,
    arguments,
    changing_loss,
    collate,
    on_ranks_of_placement,
    tiny_llama,
    use_fsdp2,
)
from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.engine.ranks import rank as engine_rank
from torchtune_adaptive.errors import ConfigError, LimitExhaustedError
from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveMixin, AdaptiveTrainer
from torchtune_adaptive.hf.evaluation import Evaluator
from torchtune_adaptive.hf.samples import SAMPLES_KEY, KeepSamples

pytestmark = pytest.mark.timeout(300)
SAMPLES = Counting(22)  # the last batch of 4 is incomplete


class Outcome(NamedTuple):
    """The results of an evaluation and a prediction."""

    metrics: dict[str, float]
    predictions: Any = None
    labels: Any = None
    recoveries: float = 0

    def difference(self, stock: Outcome) -> float:
        """Return the largest relative difference from stock."""
        assert self.metrics.keys() == stock.metrics.keys()
        worst = max(abs(self.metrics[name] - value) / (abs(value) or 1) for name, value in stock.metrics.items())
        if stock.predictions is not None:
            assert self.predictions.shape == stock.predictions.shape
            assert np.array_equal(self.labels, stock.labels)
            counts = np.abs(stock.predictions).max()
            worst = max(worst, np.abs(self.predictions - stock.predictions).max() / counts)
        return float(worst)


def accuracy(results: Any) -> dict[str, float]:
    predictions, labels = np.asarray(results.predictions), np.asarray(results.label_ids)
    if predictions.ndim == 3:
        predictions = predictions.argmax(-1)
    counts = labels[:, 1:] != -100
    return {"accuracy": float((predictions[:, :-1] == labels[:, 1:])[counts].mean())}


@contextmanager
def out_of_memory(model: Any, *, rank: int, rows: int = 2) -> Iterator[list[int]]:
    """Fail in the last layer of this model, on one rank, with more than these rows."""
    failed: list[int] = []

    def fail(layer: Any, inputs: Any) -> None:
        if len(inputs[0]) > rows and rank == engine_rank():
            failed.append(len(inputs[0]))
            raise torch.OutOfMemoryError("no room")

    *_, last = (each for each in model.modules() if isinstance(each, GradientCheckpointingLayer))
    hook = last.register_forward_pre_hook(fail)
    try:
        yield failed
    finally:
        hook.remove()


RECOVERIES = "oom_recoveries/evaluation"
OF_TRAINER = ("preprocess_logits_for_metrics", "compute_metrics")
"""Options of the trainer. Others are settings."""


def evaluate(folder: Path, kind: type[Trainer], *, rank: int = -1, **options: Any) -> tuple[Outcome, int]:
    """Collective: evaluate in training and after it, and predict; optionally, one rank runs out of memory."""
    set_seed(7)
    given = {"compute_metrics": accuracy, **{name: options.pop(name) for name in OF_TRAINER if name in options}}
    settings = arguments(
        folder,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=1,
        max_steps=2,
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=1,
        **options,
    )
    data = {"train_dataset": Counting(8), "eval_dataset": SAMPLES, "data_collator": collate}
    trainer = kind(model=tiny_llama(), args=settings, **data, **given)
    with out_of_memory(trainer.model, rank=rank) as failed:
        trainer.train()  # before that, stock cannot evaluate under FSDP2
        predicted = trainer.predict(SAMPLES)
        metrics = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        metrics += [trainer.evaluate(), predicted.metrics]
    timed = ("runtime", "per_second", "time")
    results = {
        f"{number} {name}": value
        for number, each in enumerate(metrics)
        for name, value in each.items()
        if not name.endswith((*timed, RECOVERIES))
    }
    recoveries = max(each.get(RECOVERIES, 0) for each in trainer.state.log_history)
    return Outcome(results, predicted.predictions, predicted.label_ids, recoveries), len(failed)


def largest(logits: Any, labels: Any) -> Any:
    return logits.argmax(-1)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"eval_accumulation_steps": 1},
    {"prediction_loss_only": True},
    {"label_smoothing_factor": 0.1},
    {"average_tokens_across_devices": False},
    {"preprocess_logits_for_metrics": largest},
    {"batch_eval_metrics": True, "compute_metrics": lambda results, compute_result: accuracy(results)},
]


@pytest.mark.smoke("one process")
@pytest.mark.parametrize("placement", RANKS)
@on_ranks_of_placement(timeout_s=100)
def test_evaluation_that_runs_out_of_memory_gives_the_results_of_stock(placement: str, tmp_path: Path) -> None:
    if placement == "FSDP2":
        use_fsdp2()
    last = RANKS[placement] - 1
    for options in OPTIONS:
        stock, _ = evaluate(tmp_path, Trainer, **options)
        ours, failures = evaluate(tmp_path, AdaptiveTrainer, rank=last, **options)
        assert ours.difference(stock) < 1e-6, options
        assert ours.recoveries > 0
        assert (failures > 0) == (engine_rank() == last)


@pytest.mark.parametrize("base", [Trainer, Means], ids=["sum", "mean"])
def test_evaluation_is_split_to_stay_within_the_memory_limit(base: type[Trainer], tmp_path: Path) -> None:
    with MemoryMeter(1200 * 1024), pytest.raises(torch.OutOfMemoryError):
        evaluation_only(tmp_path, base=base)
    limited = evaluation_only(tmp_path, AdaptiveArguments(memory_limit="1200KiB"), base)
    assert limited == pytest.approx(evaluation_only(tmp_path, base=base), rel=1e-6)


def test_piece_of_a_batch_with_nested_inputs_has_only_its_rows() -> None:
    def nested(features: list[dict[str, int]]) -> dict[str, Any]:
        ids = torch.tensor([each["id"] for each in features])
        return {"input_ids": ids[:, None], "of_sample": {"weight": ids / 2}, "names": [str(each) for each in features]}

    features = [{"id": number} for number in range(4)]
    evaluator: Any = Evaluator(None)
    evaluator._collate = KeepSamples(nested)
    evaluator._inputs = evaluator._collate(features)
    evaluator._samples = evaluator._inputs.pop(SAMPLES_KEY).samples
    piece, expected = evaluator._inputs_of([1, 3]), nested([features[1], features[3]])
    assert piece["input_ids"].tolist() == expected["input_ids"].tolist()
    assert piece["of_sample"]["weight"].tolist() == expected["of_sample"]["weight"].tolist()
    assert piece["names"] == expected["names"]


class Classifier(torch.nn.Module):
    """Compares samples with the embeddings of four classes, which are part of the batch, and edits the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(256, 8)

    def forward(self, input_ids: Any, scale: Any, classes: Any) -> dict[str, Any]:
        if len(input_ids) > 2 and self.fails:
            scale /= 25
            raise torch.OutOfMemoryError("no room")
        scale /= 25
        return {"logits": (self.embedding(input_ids).mean(1) * scale[:, None]) @ classes.T}

    fails = False


def test_failed_pass_does_not_change_the_batch_and_only_rows_are_sliced(tmp_path: Path) -> None:
    def classified(samples: Any) -> Any:
        ids = torch.tensor([each["input_ids"][:4] for each in samples])
        return {"input_ids": ids, "scale": ids[:, 0].float(), "classes": torch.arange(32.0).view(4, 8)}

    settings = arguments(tmp_path, per_device_eval_batch_size=4, remove_unused_columns=False)
    options: Any = {"args": settings, "data_collator": classified}
    stock, ours = (kind(model=Classifier(), **options) for kind in (Trainer, AdaptiveTrainer))
    ours.model.fails = True
    predictions = ours.predict(Counting(8)).predictions
    assert np.abs(predictions - stock.predict(Counting(8)).predictions).max() < 1e-4


def test_prediction_without_labels_has_the_logits_of_stock(tmp_path: Path) -> None:
    settings = arguments(tmp_path, per_device_eval_batch_size=4)
    stock, ours = (kind(model=tiny_llama(), args=settings) for kind in (Trainer, AdaptiveTrainer))
    unlabeled = [{"input_ids": [row] * 20, "attention_mask": [1] * 20} for row in range(1, 11)]
    with out_of_memory(ours.model, rank=0) as failed:
        predictions = ours.predict(unlabeled).predictions
    assert failed
    assert np.abs(predictions - stock.predict(unlabeled).predictions).max() < 1e-6


def evaluation_only(folder: Path, adaptive: AdaptiveArguments | None = None, base: type[Trainer] = Trainer) -> float:
    """Return the loss of an evaluation without training."""
    settings = arguments(folder, per_device_eval_batch_size=8, prediction_loss_only=True)
    kind = base if adaptive is None else type("Adaptive", (AdaptiveMixin, base), {})
    options: dict[str, Any] = {} if adaptive is None else {"adaptive": adaptive}
    trainer = kind(model=tiny_llama(), args=settings, eval_dataset=SAMPLES, data_collator=collate, **options)
    return float(trainer.evaluate()["eval_loss"])


def test_evaluation_fails_with_one_message_if_a_single_row_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(LimitExhaustedError, match=r"a microbatch of 1 row .* does not fit.*raise memory_limit"):
        evaluation_only(tmp_path, AdaptiveArguments(memory_limit="480KiB"))


@pytest.mark.parametrize("change", [lambda loss: loss**2, lambda loss: loss * 0], ids=["squared", "zero"])
def test_evaluation_of_a_loss_that_may_not_add_up_fails_only_after_running_out_of_memory(
    change: Any, tmp_path: Path
) -> None:
    base = changing_loss(lambda _, loss: change(loss))
    assert evaluation_only(tmp_path, AdaptiveArguments(), base) == evaluation_only(tmp_path, base=base)
    with pytest.raises(ConfigError, match=r"the batch cannot be split.*lower per_device_eval_batch_size"):
        evaluation_only(tmp_path, AdaptiveArguments(memory_limit="1200KiB"), base)


def test_evaluation_loop_of_a_subclass_gets_the_batches_of_stock(tmp_path: Path) -> None:
    class Own(Trainer):
        def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
            for batch in dataloader:
                assert self.model(**batch).loss > 0
            return super().evaluation_loop(dataloader, *args, **kwargs)

    assert evaluation_only(tmp_path, AdaptiveArguments(), Own) == evaluation_only(tmp_path)
