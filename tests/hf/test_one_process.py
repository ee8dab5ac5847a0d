"""Compare Trainer with and without the mixin, in this process."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForTokenClassification,
    Trainer,
    TrainerCallback,
    set_seed,
)

from tests.hf.trainers import (
    LONGEST,
    Counting,
    Means,
    Run,
    arguments,
    changing_loss,
    collate,
    difference,
    tiny_llama,
    train,
)
from torchtune_adaptive.errors import (
    ConfigError,
    LimitExhaustedError,
    OneRowDoesNotFitError,
    RecoveryUnsupportedError,
)
from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveTrainer, adaptive
from torchtune_adaptive.hf.steps import forgetting_offloaded

pytestmark = pytest.mark.timeout(300)

AS_IT_IS, SOME_TOKENS = AdaptiveArguments(), AdaptiveArguments(token_budget=100)
WITHOUT = "training continues without recovery"
ONE_BY_ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12}
ONE_BATCH = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}


@cache
def stock(folder: Path, **options: Any) -> Run:
    return train(folder, arguments=arguments(folder, **options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


# datasets, models and trainers whose runs are compared


class Stream(IterableDataset):
    """A stream that ends within a step, if it has few samples."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return islice(Counting(), self.samples)


class PartlyTargets(Counting):
    """Every third sample has no token in the loss."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        sample = super().__getitem__(index)
        return sample if index % 3 else {**sample, "labels": [-100] * len(sample["labels"])}


class AllTargets(Counting):
    """Every token is in the loss."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Tags(PartlyTargets):
    """Labels of three classes of tokens."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        sample = super().__getitem__(index)
        return {**sample, "labels": [label if label < 0 else label % 3 for label in sample["labels"]]}


def tagger() -> LlamaForTokenClassification:
    set_seed(1)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_labels": 3}
    return LlamaForTokenClassification(
        LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0, classifier_dropout=0.0)
    )


class Plain(torch.nn.Module):
    """A causal model that transformers does not know, and therefore not that its loss shifts labels."""

    def __init__(self, norm: torch.nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)
        self.norm = norm or torch.nn.Identity()

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> dict[str, Any]:
        logits = self.head(self.norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2))
        return {"loss": torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def noisy(trainer: Any, loss: Any) -> Any:
    """Draw from every random generator, and once more in training."""
    loss = loss * (1 + torch.rand(())) if trainer.model.training else loss
    return loss * (1 + random.random() + np.random.random() + torch.rand(()))


class Temperature(Trainer):
    """Learns a factor of the loss, outside the model, in the optimizer of the model or in its own."""

    separate = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(3)
        factor = torch.nn.Linear(1, 1, bias=False)
        self.factors = [factor]  # in a list, so that only its optimizer shows that it is trained
        if self.separate:
            self.factor = factor
            self.add_callback(StepsOptimizer(torch.optim.SGD(factor.parameters(), lr=0.1)))

    def create_optimizer(self, *_: Any) -> Any:
        outside = [] if self.separate else self.factors[0].parameters()
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *outside], lr=self.args.learning_rate)
        return self.optimizer

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * self.factors[0].weight.exp().sum()


class Separate(Temperature):
    separate = True


class StepsOptimizer(TrainerCallback):
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class EditsInputs(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        scale = inputs.pop("scale").div_(2)
        return super().compute_loss(model, inputs, *args, **kwargs) * scale.mean()


class MovesInputs(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        moved = {name: value.to(self.args.device) for name, value in inputs.items()}
        return super().training_step(model, moved, *args, **kwargs)


class RemovesInputs(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, inputs, *args, **kwargs)
        inputs.clear()
        return loss


def scaled(samples: Any) -> Any:
    return {**collate(samples), "scale": torch.full((len(samples),), 2.0)}


def masked_in_inference_mode(samples: Any) -> Any:
    batch = collate(samples)
    with torch.inference_mode():
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


class ChangesAttributes(Trainer):
    """Its loss changes an attribute with a default of the class, one that becomes a tensor, and a tensor in place."""

    calls = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.average: Any = 0.0
        self.total = torch.zeros(())

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        factor = 1 + (self.calls + self.average + self.total) / 100
        self.calls += 1
        self.average = 0.5 * self.average + loss.detach()
        self.total.add_(loss.detach())
        return loss * factor


class KeepsAnAverage(Plain):
    """A model that assigns a new tensor to a buffer, counts its calls, and initializes itself in the first one, which
    it remembers in an attribute of its class."""

    ready = False

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("average", torch.zeros(()))

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> dict[str, Any]:
        loss = super().forward(input_ids, labels, attention_mask)["loss"]
        self.average, self.calls = self.average + 1, self.calls + 1
        if not self.ready:
            self.scale, self.ready = 2.0, True
        return {"loss": self.scale * loss * (1 + (self.average > 3)) * (1 + (self.calls > 9))}


def collate_classes(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([sample[name] for sample in samples]) for name in ("input_ids", "labels")}


class Classes(Trainer):
    """Its loss is a mean over the rows of a batch that have a label."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.model_accepts_loss_kwargs = False
        labels = inputs.pop("labels")
        return self.mean(model(**inputs).logits, labels)

    def mean(self, logits: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits[:, -1, :3], labels)


class WeightedClasses(Classes):
    """Its loss is the weighted mean of `CrossEntropyLoss(weight=...)`, where class 2 has another weight."""

    def mean(self, logits: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits[:, -1, :3], labels, weight=torch.tensor([1.0, 1.0, 9.0]))


class OwnPadding(Classes):
    """Its loss ignores the label 0 instead of -100."""

    def mean(self, logits: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


def classes(labels: Sequence[int]) -> list[dict[str, Any]]:
    return [{"input_ids": [*range(n, n + 8)], "labels": label} for n, label in enumerate(labels, 1)]


class ReadsGradients(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norms: list[torch.Tensor] = []
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self.read)

    def read(self, parameter: torch.Tensor) -> None:
        self.norms.append(parameter.grad.norm())


def collate_in_place(samples: Any) -> Any:
    longest = max(len(sample["labels"]) for sample in samples)
    for sample in samples:
        sample["labels"] += [-100] * (longest - len(sample["labels"]))
    return collate(samples)


def counting_rows(*lengths: int) -> list[dict[str, list[int]]]:
    """Rows of these lengths, with each token in the loss."""
    rows = [[*range(start, start + length)] for start, length in enumerate(lengths, 1)]
    return [{"input_ids": row, "labels": row} for row in rows]


class Named(Counting):
    """A dataset with a column that models ignore."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "name": "a text"}


def collate_without_names(samples: Any) -> Any:
    assert not any("name" in sample for sample in samples)
    return collate(samples)


class EndsEpochs(TrainerCallback):
    """Ends the epoch after these batches of the run, which are not the last of their step."""

    def __init__(self, *batches: int) -> None:
        self.batches, self.seen = batches, 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen += 1
        control.should_epoch_stop = self.seen in self.batches


def ending_epochs() -> dict[str, Any]:
    """Three epochs end within a step, two of them before it is complete. A mean of means is their mean, because rows
    have one length."""
    return {"callbacks": [EndsEpochs(4, 5, 7)], "train_dataset": counting_rows(*[20] * 120)}


@dataclass(frozen=True)
class Case:
    """A run that is compared with stock."""

    options: Callable[[], dict[str, Any]] = dict
    """Made anew for each run."""
    settings: dict[str, Any] = field(default_factory=dict)
    adaptive: AdaptiveArguments = AS_IT_IS
    faults: tuple[tuple[int, int], ...] = ()
    ours: dict[str, Any] = field(default_factory=dict)
    """Settings of our run only."""
    rows: list[float] | None = None
    """Rows of microbatches by step."""
    recoveries: int | None = None
    """As many as faults, if not given."""
    bitwise: bool = True
    """Healthy steps with the batches of stock are bitwise equal."""
    recovers: bool = True
    """False if training continues without recovery."""


FAULTS, LATE = ((2, 40), (4, 300)), ((2, 900),)
SPLIT = {**ONE_BY_ONE, "gradient_accumulation_steps": 4, "max_steps": 4, "remove_unused_columns": False}
EPOCH = {"num_train_epochs": 1, "max_steps": -1}
EPOCHS = {"num_train_epochs": 4, "max_steps": -1}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
SEARCHED = AdaptiveArguments(use_maximum_batch_size=True, memory_limit="5MiB")
FEW_TOKENS, MEASURED = AdaptiveArguments(token_budget=50), AdaptiveArguments(token_budget="auto", memory_limit="5MiB")
ALONE, SHORT = {"gradient_accumulation_steps": 1}, {"max_steps": 3}
SOME_ROWS_LABELED = [n % 3 if n % 4 else -100 for n in range(1, 97)]
CASES = {
    "plain": Case(),
    "bf16": Case(settings={"bf16": True}),
    "smoothed and checkpointed": Case(settings={"label_smoothing_factor": 0.1, "gradient_checkpointing": True}),
    "an epoch with an incomplete step": Case(
        settings={**EPOCH, "dataloader_num_workers": 1, "train_sampling_strategy": "group_by_length"}
    ),
    "evaluations": Case(lambda: {"eval_dataset": Counting(8)}, ours={"eval_strategy": "steps", "eval_steps": 2}),
    "tensors of inference mode": Case(lambda: {"data_collator": masked_in_inference_mode}),
    "dropout": Case(lambda: {"model": tiny_llama(attention_dropout=0.2)}),
    "random numbers": Case(lambda: {"base": changing_loss(noisy)}),
    "a loss that changes attributes": Case(lambda: {"base": ChangesAttributes}, ALONE),
    "a model that keeps an average": Case(lambda: {"model": KeepsAnAverage()}, ALONE),
    "NEFTune": Case(settings={**SHORT, "neftune_noise_alpha": 5}),
    "hooks that read gradients": Case(lambda: {"base": ReadsGradients}, SHORT, recovers=False),
    "lists padded in place": Case(lambda: {"data_collator": collate_in_place}, SHORT),
    "another label for ignored tokens": Case(
        lambda: {"base": OwnPadding, "train_dataset": counting_rows(*[16] * 72)},
        bitwise=False,
    ),
    "failures": Case(faults=FAULTS, rows=[4, 2, 2, 1, 1, 1]),
    "failures, means of batches": Case(
        lambda: {"base": Means, "train_dataset": PartlyTargets()}, faults=FAULTS, rows=[4, 2, 2, 1, 1, 1]
    ),
    "failure, rows without a label": Case(
        lambda: {"base": Classes, "data_collator": collate_classes, "train_dataset": classes(SOME_ROWS_LABELED)},
        faults=((2, 40),),
    ),
    "late failure, parameters outside the model": Case(lambda: {"base": Temperature}, SPLIT, faults=LATE),
    "late failure, another optimizer": Case(lambda: {"base": Separate}, SPLIT, faults=LATE),
    "late failure, edited inputs": Case(lambda: {"base": EditsInputs, "data_collator": scaled}, SPLIT, faults=LATE),
    "inputs removed after each batch": Case(lambda: {"base": RemovesInputs}, SHORT),
    "late failure, moved inputs": Case(lambda: {"base": MovesInputs}, SPLIT, faults=LATE),
    "searched": Case(
        lambda: {"train_dataset": Named(), "data_collator": collate_without_names},
        {**ONE_BY_ONE, "max_steps": 2},
        SEARCHED,
        rows=[4, 4],
    ),
    "tokens": Case(adaptive=SOME_TOKENS),
    "tokens, compiled": Case(adaptive=SOME_TOKENS, ours=COMPILED),
    "tokens, a stream": Case(lambda: {"train_dataset": Stream(120)}, adaptive=SOME_TOKENS),
    "tokens, means": Case(lambda: {"base": Means}, ONE_BATCH, FEW_TOKENS),
    "tokens, means over some samples": Case(
        lambda: {"base": Means, "train_dataset": PartlyTargets()}, ONE_BATCH, FEW_TOKENS
    ),
    "tokens, means over several batches": Case(  # equal to a mean of means, because rows have one length
        lambda: {"base": Means, "train_dataset": counting_rows(*[20] * 72)}, adaptive=SOME_TOKENS
    ),
    "tokens, an unknown model": Case(lambda: {"model": Plain(), "train_dataset": AllTargets()}, ONE_BATCH, FEW_TOKENS),
    "tokens, classes of tokens": Case(
        lambda: {"model": tagger(), "train_dataset": Tags()}, {**ONE_BATCH, "max_steps": 2}, FEW_TOKENS
    ),
    "measured tokens, classes of tokens": Case(
        lambda: {"model": tagger(), "train_dataset": Tags()}, {**ONE_BATCH, "max_steps": 2}, MEASURED
    ),
    "a stream that ends within a step": Case(lambda: {"train_dataset": Stream(26)}, bitwise=False),
    "failure, a stream that ends within a step": Case(  # in the batch left over, and in the step that it is added to
        lambda: {"train_dataset": Stream(26)}, faults=((3, 40),), recoveries=2
    ),
    "epochs that end within a step": Case(ending_epochs, EPOCHS, bitwise=False),
    "failure, epochs that end within a step": Case(ending_epochs, EPOCHS, faults=((2, 40),)),
    "means, epochs that end within a step": Case(lambda: {**ending_epochs(), "base": Means}, EPOCHS, bitwise=False),
    "failure, means, epochs that end within a step": Case(
        lambda: {**ending_epochs(), "base": Means}, EPOCHS, faults=((2, 40),)
    ),
}


@pytest.mark.smoke("plain", "failures", "tokens")
@pytest.mark.parametrize("name", CASES)
def test_run_trains_like_stock(name: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    torch.manual_seed(3)
    theirs = train(folder, arguments=arguments(folder, **case.settings), **case.options())
    torch.manual_seed(3)
    settings = arguments(folder, **{**case.settings, **case.ours})
    ours = train(folder, case.adaptive, faults=case.faults, arguments=settings, **case.options())
    is_bitwise = case.bitwise and not case.faults and case.adaptive is AS_IT_IS
    assert difference(ours, theirs) <= (0.0 if is_bitwise else 1e-6)
    expected = len(case.faults) if case.recoveries is None else case.recoveries
    assert ours.column("oom_recoveries")[-1] == expected
    assert case.rows in (None, ours.log[0].get("microbatch_rows") and ours.column("microbatch_rows"))
    assert (WITHOUT in caplog.text) != case.recovers


@pytest.mark.parametrize("lengths", [(20, 30), (30, 30)], ids=["padding", "no padding"])
def test_probes_have_padding_if_batches_have_it(folder: Path, lengths: tuple[int, int]) -> None:
    padding: list[bool] = []

    class Records(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 0 and torch.is_grad_enabled() and len(inputs["input_ids"]) > 1:
                padding.append(not inputs["attention_mask"].all())
            return super().compute_loss(model, inputs, *args, **kwargs)

    options = arguments(folder, max_steps=1, gradient_accumulation_steps=1)
    train(folder, SEARCHED, base=Records, train_dataset=counting_rows(*lengths * 12), arguments=options)
    assert len(padding) > 1
    assert set(padding) == {len(set(lengths)) > 1}


def test_measured_token_budget_trains_like_stock(folder: Path) -> None:
    ours = train(folder, MEASURED, arguments=arguments(folder, max_steps=2))
    assert 4 * LONGEST < ours.column("microbatch_tokens")[0] < 8 * LONGEST
    assert ours.column("oom_recoveries") == [0, 0]
    assert difference(ours, stock(folder, max_steps=2)) < 1e-6


class FullDisk(Trainer):
    """The fourth step cannot be saved."""

    def _save_rng_state(self, output_dir: str) -> None:
        if output_dir.endswith("-4"):
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._save_rng_state(output_dir)


@pytest.mark.parametrize("torn", [None, "trainer_state.json", "rng_state_1.pth"])
def test_resume_skips_a_checkpoint_whose_save_was_interrupted(
    folder: Path, tmp_path: Path, torn: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    settings = arguments(tmp_path, save_strategy="steps", save_steps=2)
    with pytest.raises(OSError, match="No space left on device"):
        train(tmp_path, AS_IT_IS, base=FullDisk, arguments=settings)
    if torn is not None:
        whole = {
            name: (tmp_path / "checkpoint-2" / name).read_bytes() for name in ("trainer_state.json", "rng_state.pth")
        }
        whole["rng_state_1.pth"] = whole.pop("rng_state.pth")
        for name, content in whole.items():
            (tmp_path / "checkpoint-4" / name).write_bytes(content[: len(content) // (2 if name == torn else 1)])
    resumed = train(tmp_path, AS_IT_IS, resume=True, arguments=settings)
    assert f"{tmp_path / 'checkpoint-4'} is skipped: its save was interrupted" in caplog.text
    assert difference(resumed, stock(folder)) == 0.0


def test_resume_without_a_complete_checkpoint_is_an_error_or_starts_from_the_beginning(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ConfigError, match=f"{tmp_path} contains no complete checkpoint"):
        train(tmp_path, AS_IT_IS, resume=True, arguments=arguments(tmp_path))
    ours = train(tmp_path, AS_IT_IS, resume="auto", arguments=arguments(tmp_path))
    assert difference(ours, stock(folder)) == 0.0


def test_checkpoint_is_incomplete_while_it_is_overwritten(tmp_path: Path) -> None:
    settings = arguments(tmp_path, save_strategy="steps", save_steps=2)
    train(tmp_path, AS_IT_IS, arguments=settings)
    with pytest.raises(OSError, match="No space left on device"):
        train(tmp_path, AS_IT_IS, base=FullDisk, resume=str(tmp_path / "checkpoint-2"), arguments=settings)
    assert not (tmp_path / "checkpoint-4" / "trainer_state.json").exists()


# runs that end, with the reason


class InTraining(Trainer):
    """Add a term in training that compares the rows of a batch, from a step on."""

    begins_at = 1

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if model.training and self.state.global_step + 1 >= self.begins_at:
            rows = outputs["logits"].mean(1)
            loss = loss - torch.log_softmax(rows @ rows.T, -1).diagonal().mean()
        return loss


class FromStep12(InTraining):
    begins_at = 12


class Compares(Trainer):
    """Compares the rows of a batch. The loss of few rows is 0, because they differ."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.model_accepts_loss_kwargs = False
        outputs = model(**inputs)
        rows = torch.nn.functional.normalize(outputs.logits.mean(1), dim=-1)
        return self.of_rows(30 * rows @ rows.T, outputs.loss)

    def of_rows(self, similarity: Any, _: Any) -> Any:
        return torch.nn.functional.cross_entropy(similarity, torch.arange(len(similarity)))


class Hinge(Compares):
    """Adds a term to the loss that is 0 unless two rows are similar."""

    def of_rows(self, similarity: Any, loss: Any) -> Any:
        return loss + (similarity - 20).relu().triu(1).sum()


def of_mean(change: Callable[[Any], Any]) -> type:
    return changing_loss(lambda _, loss: change(loss), Means)


UNDECIDED_LOSSES = {
    "separated": Compares,
    "clipped": of_mean(lambda loss: loss.clamp(max=1)),
    "saturated": of_mean(lambda loss: (9 * loss).tanh()),
    "constant": of_mean(lambda loss: 0 * loss + 1),
    "zero": of_mean(lambda loss: 0 * loss),
    "NaN": of_mean(lambda loss: loss * torch.nan),
}
BATCH_OF_16 = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("base", [*UNDECIDED_LOSSES.values(), Hinge], ids=[*UNDECIDED_LOSSES, "hinge"])
def test_loss_of_which_two_rows_show_nothing_is_not_split(base: type, folder: Path) -> None:
    options: dict[str, Any] = {"base": base, "arguments": arguments(folder, **BATCH_OF_16)}
    ours, stock = train(folder, AS_IT_IS, **options), train(folder, **options)
    np.testing.assert_array_equal(ours.column("loss"), stock.column("loss"))  # which may be NaN
    with pytest.raises(RecoveryUnsupportedError, match="step 2"):
        train(folder, AS_IT_IS, faults=[(2, 40)], **options)
    with pytest.raises(ConfigError):
        train(folder, SOME_TOKENS, **options)


def test_step_whose_losses_show_nothing_is_split_as_earlier_ones(folder: Path) -> None:
    base = changing_loss(lambda trainer, loss: loss * (trainer.state.global_step != 1), Means)
    options: dict[str, Any] = {"base": base, "arguments": arguments(folder, **BATCH_OF_16)}
    ours, stock = train(folder, SOME_TOKENS, **options), train(folder, **options)
    assert stock.column("loss")[1] == 0
    assert difference(ours, stock) < 1e-5


def test_loss_that_depends_on_padding_is_not_split_although_all_samples_are_long(folder: Path) -> None:
    class Padded(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            logits, labels = model(inputs["input_ids"]).logits, inputs["labels"]
            return torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none").mean()

    lengths = [40, 90, 60, 50, 80, 45, 70, 55] * 4
    rows = [{"input_ids": [*range(1, each + 1)], "labels": [*range(1, each + 1)]} for each in lengths]
    with pytest.raises(ConfigError, match="neither their sum nor their mean"):
        train(folder, SOME_TOKENS, base=Padded, train_dataset=rows, arguments=arguments(folder, **BATCH_OF_16))


def masked_at_random(samples: Any) -> Any:
    batch = collate(samples)
    return {**batch, "labels": batch["labels"].where(torch.rand(batch["labels"].shape) > 0.5, -100)}


class MaskedBySeed:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, samples: Any) -> Any:
        batch = collate(samples)
        drawn = torch.rand(batch["labels"].shape, generator=self.generator)
        return {**batch, "labels": batch["labels"].where(drawn > 0.5, -100)}


class EditsBefore(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs["labels"][:, 3:] = -100
        return super().training_step(model, inputs, *args, **kwargs)


class EditsAfter(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, inputs, *args, **kwargs)
        inputs["labels"][:, 3:] = -100
        return loss


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(lambda: {"data_collator": masked_at_random}, id="random batches"),
        pytest.param(lambda: {"data_collator": MaskedBySeed()}, id="batches by a seed"),
        pytest.param(lambda: {"base": EditsBefore}, id="edited batches"),
        pytest.param(lambda: {"base": InTraining}, id="compared rows"),
        pytest.param(
            lambda: {"base": InTraining, "model": tiny_llama(attention_dropout=0.2)}, id="compared rows, with dropout"
        ),
        pytest.param(lambda: {"base": changing_loss(lambda _, loss: loss**2, Means)}, id="squared mean"),
    ],
)
def test_step_that_cannot_be_split_trains_like_stock_until_memory_runs_out(
    folder: Path, options: Callable[[], dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    def run(adaptive: AdaptiveArguments | None = None, **more: Any) -> Run:
        return train(folder, adaptive, **options(), arguments=arguments(folder, gradient_accumulation_steps=2), **more)

    assert difference(run(AS_IT_IS), run()) == 0.0
    assert caplog.text.count(WITHOUT) == 1
    with pytest.raises(RecoveryUnsupportedError):
        run(AS_IT_IS, faults=[(2, 40)])
    with pytest.raises(ConfigError):
        run(SOME_TOKENS)


def test_loss_that_no_longer_adds_up_ends_the_run_only_if_a_step_is_split(folder: Path) -> None:
    def run(adaptive: AdaptiveArguments | None = None, **settings: Any) -> Run:
        return train(folder, adaptive, base=FromStep12, arguments=arguments(folder, max_steps=20, **ALONE), **settings)

    assert difference(run(AS_IT_IS), run()) == 0.0
    with pytest.raises(RecoveryUnsupportedError, match="step 14"):
        run(AS_IT_IS, faults=[(14, 40)])
    with pytest.raises(ConfigError, match="steps 8 to 15"):
        run(SOME_TOKENS)


class Regularized(Trainer):
    """Calls backward itself."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, *args, **kwargs)
        self.accelerator.backward(sum(each.square().sum() for each in model.parameters()))
        return loss


class SkipsTheLastBatch(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.accelerator.sync_gradients:
            return torch.zeros(())
        return super().training_step(model, inputs, *args, **kwargs)


class OwnStep(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return model(**inputs).loss.detach()


class Full(torch.optim.SGD):
    def step(self, *_: Any) -> None:
        raise torch.OutOfMemoryError("no room")


def no_room(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no room")


def full_optimizer(trainer: Any, *_: Any) -> Any:
    trainer.optimizer = Full(trainer.model.parameters())
    return trainer.optimizer


def failing(**methods: Any) -> dict[str, Any]:
    return {"base": type("Failing", (Trainer,), methods), "eval_dataset": Counting(8)}


SEARCHING = {"use_maximum_batch_size": True}
TOO_SMALL = {"adaptive": {**SEARCHING, "memory_limit": "1000KiB"}}
TWO = {"settings": {"gradient_accumulation_steps": 2}}
EVALUATING = {"settings": {"eval_strategy": "steps", "eval_steps": 2}}
CANNOT_GATHER = {"gather_function": property(lambda _: no_room, lambda *_: None)}
RARE = {"train_dataset": classes([0, 1] * 5 + [0, 2]), "data_collator": collate_classes, "base": WeightedClasses}
REFUSED: dict[str, tuple[type, str, dict[str, Any]]] = {
    "one row": (LimitExhaustedError, "gradient_checkpointing=True", {"faults": [(2, 40)] * 5}),
    "one row of a search": (OneRowDoesNotFitError, "memory_limit", TOO_SMALL),
    "a search without a limit": (ConfigError, "memory_limit", {"adaptive": SEARCHING}),
    "backward": (ConfigError, "backward", {"base": Regularized}),
    "edits of a collected batch": (ConfigError, "changes a batch", {"base": EditsAfter, **TWO}),
    "a skipped batch": (ConfigError, "super", {"base": SkipsTheLastBatch, **TWO}),
    "another training step": (ConfigError, "super", {"base": OwnStep}),
    "a rare class": (ConfigError, "neither their sum nor their mean", {"adaptive": {"token_budget": 100}, **RARE}),
    "a token budget below each sample": (ConfigError, "token_budget: 3 is less", {"adaptive": {"token_budget": 3}}),
    "a stream that is too short": (ConfigError, "gradient_accumulation_steps", {"train_dataset": Stream(8)}),
    "no memory for the check of the loss": (
        RecoveryUnsupportedError,
        "per_device_train_batch_size=1",
        failing(compute_loss=no_room),
    ),
    "no memory for the optimizer": (RecoveryUnsupportedError, "optimizer", failing(create_optimizer=full_optimizer)),
    "no memory to evaluate": (
        RecoveryUnsupportedError,
        "prediction_loss_only=True",
        {"adaptive": {"recover_from_oom": False}, **EVALUATING, **failing(prediction_step=no_room)},
    ),
    "no memory to gather results": (
        RecoveryUnsupportedError,
        "per_device_eval_batch_size",
        {**EVALUATING, **failing(**CANNOT_GATHER)},
    ),
}


def refusal(folder: Path, kind: type, **options: Any) -> str:
    adaptive, settings = options.pop("adaptive", {}), options.pop("settings", {})
    with pytest.raises(kind) as refused:
        train(folder, AdaptiveArguments(**adaptive), arguments=arguments(folder, **settings), **options)
    return str(refused.value)


@pytest.mark.parametrize("name", REFUSED)
def test_run_that_cannot_continue_ends_with_the_reason(name: str, folder: Path) -> None:
    kind, named, options = REFUSED[name]
    assert named in refusal(folder, kind, **options)


def test_checkpointing_is_not_recommended_twice(folder: Path) -> None:
    settings = {"gradient_checkpointing": True}
    assert "checkpoint" not in refusal(folder, OneRowDoesNotFitError, **TOO_SMALL, settings=settings)


def test_batch_normalization_is_refused_and_keeps_its_statistics(folder: Path) -> None:
    model = Plain(torch.nn.BatchNorm1d(16))
    with pytest.raises(ConfigError):
        train(folder, SOME_TOKENS, model=model, arguments=arguments(folder))
    assert not model.norm.running_mean.any()


@pytest.mark.parametrize(
    ("named", "settings", "change"),
    [
        ("auto_find_batch_size", {"auto_find_batch_size": True}, lambda _: None),
        ("CUDA graphs", {"torch_compile_mode": "reduce-overhead"}, lambda _: None),
        ("lomo", {"optim": "lomo"}, lambda _: None),
        ("batch_rebalance", {"train_sampling_strategy": "batch_rebalance"}, lambda _: None),
        ("DataParallel", {}, lambda trainer: setattr(trainer.args, "_n_gpu", 2)),
        ("DeepSpeed", {}, lambda trainer: setattr(trainer, "is_deepspeed_enabled", True)),
        ("FSDP1", {}, lambda trainer: setattr(trainer, "is_fsdp_enabled", True)),
    ],
)
def test_unsupported_arguments_are_refused_in_one_line(
    folder: Path, named: str, settings: dict[str, Any], change: Callable[[Trainer], None]
) -> None:
    class Changed(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            change(self)

    with pytest.raises(ConfigError, match=f"^AdaptiveChanged does not support .*{named}.*$"):
        adaptive(Changed)(model=torch.nn.Linear(1, 1), args=arguments(folder, **settings))


def test_offloaded_tensors_of_a_failed_microbatch_are_forgotten() -> None:
    class Offloading(nullcontext[None]):
        tracker: ClassVar[dict[int, torch.Tensor]] = {}

    trainer = SimpleNamespace(maybe_activation_offload_context=Offloading())
    with suppress(torch.OutOfMemoryError), forgetting_offloaded(trainer):
        Offloading.tracker[0] = torch.ones(1)
        raise torch.OutOfMemoryError
    assert not Offloading.tracker


def test_dispatched_batches_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = arguments(folder, accelerator_config={"dispatch_batches": True})
    trainer = AdaptiveTrainer(model=tiny_llama(), args=options, train_dataset=Counting(), data_collator=collate)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(ConfigError, match="'dispatch_batches': False"):
        trainer.get_train_dataloader()


def test_adaptive_takes_arguments_for_trainers_that_other_code_constructs(folder: Path) -> None:
    base = adaptive(Trainer, memory_limit="1GiB", regrow_after=3)
    trainer, other = adaptive(base, regrow_after=5)(tiny_llama(), arguments(folder)), AdaptiveTrainer(tiny_llama())
    assert trainer.adaptive == AdaptiveArguments(memory_limit="1GiB", regrow_after=5)
    assert other.adaptive == AdaptiveArguments()
    with pytest.raises(ConfigError, match="memory_limit"):
        adaptive(Trainer, memory_limit="much")


def test_training_step_that_replaces_the_mixins_is_refused(folder: Path) -> None:
    class Own(AdaptiveTrainer):
        training_step = Trainer.training_step

    trainer = Own(model=tiny_llama(), args=arguments(folder), train_dataset=Counting(), data_collator=collate)
    with pytest.raises(ConfigError, match=r"training_step of Own does not call super\(\)"):
        trainer.train()


def test_training_step_outside_of_train_equals_stock(folder: Path) -> None:
    batch = collate([Counting()[0], Counting()[1]])

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs.logits.square().mean()

    options = {"args": arguments(folder), "compute_loss_func": loss}
    trainers = [kind(model=tiny_llama(), **options) for kind in (AdaptiveTrainer, Trainer)]
    ours, theirs = (trainer.training_step(trainer.model, dict(batch)) for trainer in trainers)
    assert torch.equal(ours, theirs)


def test_command_line_accepts_all_arguments() -> None:
    line = ["--token_budget", "4096", "--memory_limit", "24GiB", "--no_recover_from_oom", "--regrow_after", "10"]
    (parsed,) = HfArgumentParser(AdaptiveArguments).parse_args_into_dataclasses(line)
    assert parsed == AdaptiveArguments(token_budget=4096, memory_limit="24GiB", recover_from_oom=False, regrow_after=10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_budget": "many"},
        {"token_budget": 0},
        {"token_budget": 10, "use_maximum_batch_size": True},
        {"memory_limit": "lots"},
        {"recover_from_oom": "False"},
        {"use_maximum_batch_size": "yes"},
        {"regrow_after": "10"},
        {"regrow_after": -1},
    ],
)
def test_invalid_arguments_are_refused_by_name(wrong: dict[str, Any]) -> None:
    name = list(wrong)[-1]
    with pytest.raises(ConfigError, match=rf"^{name}\b"):
        AdaptiveArguments(**wrong)
