"""Compare Trainer with and without the mixin, in this process."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from tests.hf.trainers import LONGEST, Counting, Means, Run, arguments, collate, difference, tiny_llama, train
from tests.ranks import RankFailed, run_on_ranks
from torchtune_adaptive.errors import (
    AdaptiveError,
    CheckpointError,
    ConfigError,
    LimitExhaustedError,
    OneRowDoesNotFitError,
    RecoveryUnsupportedError,
)
from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveMixin, AdaptiveTrainer, adaptive

pytestmark = pytest.mark.timeout(300)

AS_IT_IS = AdaptiveArguments()
ONE_BY_ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12}


@cache
def stock(folder: Path, **options: Any) -> Run:
    return train(folder, arguments=arguments(folder, **options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.smoke("plain")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bf16": True},
        {"label_smoothing_factor": 0.1, "gradient_checkpointing": True},
        {
            "num_train_epochs": 1,
            "max_steps": -1,
            "dataloader_num_workers": 1,
            "train_sampling_strategy": "group_by_length",
        },
    ],
    ids=["plain", "bf16", "smoothed and checkpointed", "an epoch with an incomplete step"],
)
def test_equal_microbatches_train_bitwise_like_stock(folder: Path, options: dict[str, Any]) -> None:
    ours = train(folder, AS_IT_IS, arguments=arguments(folder, **options))
    assert difference(ours, stock(folder, **options)) == 0.0


def test_token_budget_trains_like_stock(folder: Path) -> None:
    ours = train(folder, AdaptiveArguments(token_budget=100), arguments=arguments(folder))
    assert ours.column("microbatch_tokens") == [100] * len(ours.log)
    assert difference(ours, stock(folder)) < 1e-6


@pytest.mark.smoke
def test_step_that_runs_out_of_memory_is_repeated_in_smaller_microbatches(folder: Path) -> None:
    ours = train(folder, AS_IT_IS, faults=[(2, 40), (4, 300)], arguments=arguments(folder))
    assert ours.column("oom_recoveries") == [0, 1, 1, 2, 2, 2]
    assert ours.column("microbatch_rows") == [4, 2, 2, 1, 1, 1]
    assert difference(ours, stock(folder)) < 1e-6


class Named(Counting):
    """A dataset with a column that models ignore."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "name": "a text"}


def collate_without_names(samples: Any) -> Any:
    assert not any("name" in sample for sample in samples)
    return collate(samples)


def test_search_finds_rows_within_the_memory_limit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adaptive = AdaptiveArguments(use_maximum_batch_size=True, memory_limit="5MiB")
    options = {**ONE_BY_ONE, "max_steps": 2}
    data = {"train_dataset": Named(), "data_collator": collate_without_names}
    ours = train(folder, adaptive, **data, arguments=arguments(folder, **options))
    assert re.search(r"\n  4 +3\.\d MiB +6\d %", capsys.readouterr().out)
    assert ours.column("microbatch_rows") == [4] * len(ours.log)
    assert difference(ours, stock(folder, **options)) < 1e-6


@pytest.mark.parametrize("lengths", [(20, 30), (30, 30)], ids=["padding", "no padding"])
def test_probes_have_padding_if_batches_have_it(folder: Path, lengths: tuple[int, int]) -> None:
    padding: list[bool] = []

    class Records(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 0 and torch.is_grad_enabled() and len(inputs["input_ids"]) > 1:
                padding.append(not inputs["attention_mask"].all())
            return super().compute_loss(model, inputs, *args, **kwargs)

    rows = [{"input_ids": [*range(1, length + 1)], "labels": [*range(length)]} for length in lengths * 12]
    adaptive = AdaptiveArguments(use_maximum_batch_size=True, memory_limit="5MiB")
    options = arguments(folder, max_steps=1, gradient_accumulation_steps=1)
    train(folder, adaptive, base=Records, train_dataset=rows, arguments=options)
    assert len(padding) > 1
    assert set(padding) == {len(set(lengths)) > 1}


def test_measured_token_budget_trains_like_stock(folder: Path) -> None:
    adaptive = AdaptiveArguments(token_budget="auto", memory_limit="5MiB")
    ours = train(folder, adaptive, arguments=arguments(folder, max_steps=2))
    assert 4 * LONGEST < ours.column("microbatch_tokens")[0] < 8 * LONGEST
    assert ours.column("oom_recoveries") == [0, 0]
    assert difference(ours, stock(folder, max_steps=2)) < 1e-6


def train_until_killed(folder: Path) -> None:
    """Kill this process in the backward of the fifth step."""

    class Killed(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.state.global_step == 4:
                loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            return loss

    options = arguments(folder, save_strategy="steps", save_steps=3)
    train(folder, AS_IT_IS, base=Killed, faults=[(2, 40)], arguments=options)


def test_killed_run_resumes_with_the_reduced_limit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="died"):
        run_on_ranks(1, train_until_killed, tmp_path, in_group=False)
    resumed = train(tmp_path, AS_IT_IS, resume=str(tmp_path / "checkpoint-3"), arguments=arguments(tmp_path))
    assert resumed.column("microbatch_rows") == [4, 2, 2, 2, 2, 2]
    assert difference(resumed, stock(folder)) < 1e-6


@pytest.mark.parametrize("torn", [None, "trainer_state.json", "rng_state_1.pth"])
def test_resume_skips_a_checkpoint_whose_save_was_interrupted(
    folder: Path, tmp_path: Path, torn: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(Trainer):
        def _save_rng_state(self, output_dir: str) -> None:
            if output_dir.endswith("-4"):
                raise OSError(errno.ENOSPC, "No space left on device")
            super()._save_rng_state(output_dir)

    settings = arguments(tmp_path, save_strategy="steps", save_steps=2)
    with pytest.raises(CheckpointError, match=r"checkpoint-4 could not be saved to .*: No space left on device; once"):
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


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_save_on_a_full_disk_ends_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / name).symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"checkpoint-2 could not be saved to .*No space left on device") as ended:
        train(tmp_path, AS_IT_IS, arguments=arguments(tmp_path, save_strategy="steps", save_steps=2))
    assert ended.value.__suppress_context__, "one traceback"


def test_checkpoint_is_incomplete_while_it_is_overwritten(tmp_path: Path) -> None:
    class FullDisk(Trainer):
        def _save_rng_state(self, output_dir: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    settings = arguments(tmp_path, save_strategy="steps", save_steps=2)
    train(tmp_path, AS_IT_IS, arguments=settings)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(tmp_path, AS_IT_IS, base=FullDisk, resume=str(tmp_path / "checkpoint-2"), arguments=settings)
    assert not (tmp_path / "checkpoint-4" / "trainer_state.json").exists()


def test_errors_of_the_engine_recommend_arguments_of_trainer(folder: Path) -> None:
    always = [(2, operation) for operation in (40, 40, 40, 40, 40)]
    with pytest.raises(LimitExhaustedError) as refused:
        train(folder, AS_IT_IS, faults=always, arguments=arguments(folder))
    assert "set gradient_checkpointing=True" in str(refused.value)
    with pytest.raises(OneRowDoesNotFitError) as refused:
        train(
            folder,
            AdaptiveArguments(use_maximum_batch_size=True, memory_limit="1000KiB"),
            arguments=arguments(folder, gradient_checkpointing=True),
        )
    assert "raise memory_limit" in str(refused.value)
    assert "checkpoint" not in str(refused.value)


class PartlyTargets(Counting):
    """Every third sample has no token in the loss."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        sample = super().__getitem__(index)
        return sample if index % 3 else {**sample, "labels": [-100] * len(sample["labels"])}


@pytest.mark.parametrize("dataset", [Counting, PartlyTargets])
def test_reduction_of_a_loss_is_found_by_experiment(folder: Path, dataset: type) -> None:
    options = {
        "base": Means,
        "train_dataset": dataset(),
        "arguments": arguments(folder, per_device_train_batch_size=12, gradient_accumulation_steps=1),
    }
    theirs = train(folder, **options)
    ours = train(folder, AdaptiveArguments(token_budget=50), **options)
    assert difference(ours, theirs) < 1e-6


def test_means_of_batches_are_averaged_like_stock_also_after_a_recovery(folder: Path) -> None:
    options = {"base": Means, "train_dataset": PartlyTargets(), "arguments": arguments(folder)}
    ours = train(folder, AS_IT_IS, faults=[(2, 40), (4, 300)], **options)
    assert ours.column("microbatch_rows")[-1] == 1
    assert difference(ours, train(folder, **options)) < 1e-6


class Plain(torch.nn.Module):
    """A causal model that transformers does not know, and therefore not that its loss shifts labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any) -> dict[str, Any]:
        logits = self.head(self.embedding(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def test_labels_that_a_mean_counts_are_found_by_experiment(folder: Path) -> None:
    class AllTargets(Counting):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return {"input_ids": self.rows[index], "labels": self.rows[index]}

    def options() -> dict[str, Any]:
        with_one_batch = arguments(folder, per_device_train_batch_size=12, gradient_accumulation_steps=1)
        return {"model": Plain(), "train_dataset": AllTargets(), "arguments": with_one_batch}

    assert difference(train(folder, AdaptiveArguments(token_budget=50), **options()), train(folder, **options())) < 1e-6


def test_labels_of_token_classification_are_valid_in_the_check(folder: Path) -> None:
    class Tags(PartlyTargets):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            sample = super().__getitem__(index)
            return {**sample, "labels": [label if label < 0 else label % 3 for label in sample["labels"]]}

    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_labels": 3}
    config = LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0, classifier_dropout=0.0)

    def options() -> dict[str, Any]:
        set_seed(1)
        model = LlamaForTokenClassification(config)
        with_one_batch = arguments(folder, per_device_train_batch_size=12, gradient_accumulation_steps=1, max_steps=2)
        return {"model": model, "train_dataset": Tags(), "arguments": with_one_batch}

    theirs = train(folder, **options())
    for ours in AdaptiveArguments(token_budget=50), AdaptiveArguments(token_budget="auto", memory_limit="5MiB"):
        assert difference(train(folder, ours, **options()), theirs) < 1e-6


def test_forward_may_draw_from_any_random_generator(folder: Path) -> None:
    class Noisy(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * (1 + random.random() + np.random.random() + torch.rand(()))

    theirs = train(folder, base=Noisy, arguments=arguments(folder))
    assert difference(train(folder, AS_IT_IS, base=Noisy, arguments=arguments(folder)), theirs) == 0.0


class Temperature(Trainer):
    """Learns a factor of the loss, outside the model, in the optimizer of the model or in its own."""

    separate = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.manual_seed(3)
        self.factor = torch.nn.Linear(1, 1, bias=False)
        if self.separate:
            self.add_callback(StepsOptimizer(torch.optim.SGD(self.factor.parameters(), lr=0.1)))

    def create_optimizer(self, *_: Any) -> Any:
        outside = [] if self.separate else self.factor.parameters()
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *outside], lr=self.args.learning_rate)
        return self.optimizer

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * self.factor.weight.exp().sum()


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


@pytest.mark.parametrize("base", [Temperature, Separate, EditsInputs, MovesInputs])
def test_step_that_fails_late_is_repeated_from_the_same_state(folder: Path, base: type[Trainer]) -> None:
    def scaled(samples: Any) -> Any:
        return {**collate(samples), **({"scale": torch.full((len(samples),), 2.0)} if base is EditsInputs else {})}

    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "remove_unused_columns": False}
    options = {"base": base, "data_collator": scaled, "arguments": arguments(folder, **settings, max_steps=4)}
    ours = train(folder, AS_IT_IS, faults=[(2, 900)], **options)
    assert ours.column("oom_recoveries")[-1] == 1
    assert difference(ours, train(folder, **options)) < 1e-6


def test_backward_in_training_step_is_refused(folder: Path) -> None:
    class Regularized(Trainer):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, *args, **kwargs)
            self.accelerator.backward(sum(each.square().sum() for each in model.parameters()))
            return loss

    with pytest.raises(ConfigError, match="training_step of Adaptive or a callback calls backward"):
        train(folder, AS_IT_IS, base=Regularized, arguments=arguments(folder))


def masked_at_random(samples: Any) -> Any:
    batch = collate(samples)
    return {**batch, "labels": batch["labels"].where(torch.rand(batch["labels"].shape) > 0.5, -100)}


def edit(inputs: Any) -> None:
    inputs["labels"][:, 3:] = -100


class EditsBefore(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        edit(inputs)
        return super().training_step(model, inputs, *args, **kwargs)


class EditsAfter(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, inputs, *args, **kwargs)
        edit(inputs)
        return loss


@pytest.mark.parametrize(
    "options", [{"data_collator": masked_at_random}, {"base": EditsBefore}], ids=["random", "edited"]
)
def test_batches_that_cannot_be_collated_again_train_like_stock_until_memory_runs_out(
    folder: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    settings = arguments(folder, gradient_accumulation_steps=2)
    theirs = train(folder, **options, arguments=settings)
    assert difference(train(folder, AS_IT_IS, **options, arguments=settings), theirs) == 0.0
    assert "training continues without recovery" in caplog.text
    cause = "collating the same samples twice gives different batches"
    with pytest.raises(RecoveryUnsupportedError, match=f"which cannot be repeated: {cause}"):
        train(folder, AS_IT_IS, faults=[(2, 40)], **options, arguments=settings)
    with pytest.raises(ConfigError, match=cause):
        train(folder, AdaptiveArguments(token_budget=100), **options, arguments=settings)


def test_training_step_that_edits_a_collected_batch_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="changes a batch after it has called"):
        train(folder, AS_IT_IS, base=EditsAfter, arguments=arguments(folder, gradient_accumulation_steps=2))


def test_training_step_that_skips_the_last_batch_is_refused(folder: Path) -> None:
    class Leaves(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self.accelerator.sync_gradients:
                return torch.zeros(())
            return super().training_step(model, inputs, *args, **kwargs)

    options = arguments(folder, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match=r"does not call super\(\).training_step for every batch of a step"):
        train(folder, AS_IT_IS, base=Leaves, arguments=options)


def test_inference_tensors_in_a_batch_are_supported(folder: Path) -> None:
    def masked(samples: Any) -> Any:
        batch = collate(samples)
        with torch.inference_mode():
            return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}

    theirs = train(folder, data_collator=masked, arguments=arguments(folder))
    ours = train(folder, AS_IT_IS, data_collator=masked, arguments=arguments(folder))
    assert difference(ours, theirs) == 0.0


class Full(torch.optim.SGD):
    def step(self, *_: Any) -> None:
        raise torch.OutOfMemoryError("no room")


def no_room(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("prediction_step", r"in evaluation \(lower .*set prediction_loss_only=True\): no room$"),
        ("gather_function", r"in evaluation while results are gathered, which cannot be split \(lower .*\): no room"),
        (
            "compute_loss",
            "in step 1, and the check of the loss, .*, ran out of memory; set per_device_train_batch_size=1",
        ),
        (
            "create_optimizer",
            "in the optimizer, whose state does not depend on the batch: no room; use a smaller model",
        ),
    ],
)
def test_unrecoverable_out_of_memory_error_names_the_place_and_remedies(folder: Path, fails: str, message: str) -> None:
    def full_optimizer(trainer: Any, *_: Any) -> Any:
        trainer.optimizer = Full(trainer.model.parameters())
        return trainer.optimizer

    failures = {"create_optimizer": full_optimizer, "gather_function": property(lambda _: no_room, lambda *_: None)}
    failing = type("Failing", (Trainer,), {fails: failures.get(fails, no_room)})
    options = arguments(folder, eval_strategy="steps", eval_steps=2)
    without = AdaptiveArguments(recover_from_oom=fails != "prediction_step")
    with pytest.raises(RecoveryUnsupportedError, match=message):
        train(folder, without, base=failing, eval_dataset=Counting(8), arguments=options)


def test_compiled_model_trains_like_stock(folder: Path) -> None:
    compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
    ours = train(folder, AdaptiveArguments(token_budget=100), arguments=arguments(folder, **compiled))
    assert difference(ours, stock(folder)) < 1e-6


def test_streamed_dataset_trains_like_stock(folder: Path) -> None:
    class Streamed(IterableDataset):
        def __iter__(self) -> Any:
            return iter(Counting())

    theirs = train(folder, train_dataset=Streamed(), arguments=arguments(folder))
    ours = train(folder, AdaptiveArguments(token_budget=100), train_dataset=Streamed(), arguments=arguments(folder))
    assert difference(ours, theirs) < 1e-6


def test_evaluation_between_steps_does_not_change_training(folder: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2}
    ours = train(folder, AS_IT_IS, eval_dataset=Counting(8), arguments=arguments(folder, **options))
    assert difference(ours, stock(folder)) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size, which restarts training"),
        ({"torch_compile_mode": "reduce-overhead"}, "CUDA graphs"),
        ({"optim": "lomo"}, "updates weights in the backward"),
    ],
)
def test_unsupported_arguments_are_refused_in_one_line(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        AdaptiveTrainer(model=torch.nn.Linear(1, 1), args=arguments(folder, **options))
    assert "\n" not in str(refused.value)


def test_several_gpus_in_one_process_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ConfigError, match="one process per GPU"):
        AdaptiveTrainer(model=torch.nn.Linear(1, 1), args=arguments(folder))


def test_dispatched_batches_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = arguments(folder, accelerator_config={"dispatch_batches": True})
    trainer = AdaptiveTrainer(model=tiny_llama(), args=options, train_dataset=Counting(), data_collator=collate)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(ConfigError, match="'dispatch_batches': False"):
        trainer.get_train_dataloader()


@pytest.mark.parametrize(
    ("flag", "message"),
    [("is_deepspeed_enabled", "does not support DeepSpeed"), ("is_fsdp_enabled", "does not support FSDP1")],
)
def test_deepspeed_and_fsdp1_are_refused(folder: Path, flag: str, message: str) -> None:
    class Sharded(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            setattr(self, flag, True)

    class Adaptive(AdaptiveMixin, Sharded):
        pass

    with pytest.raises(ConfigError, match=message):
        Adaptive(model=torch.nn.Linear(1, 1), args=arguments(folder))


def test_adaptive_makes_any_trainer_adaptive_in_one_line(folder: Path) -> None:
    options: dict[str, Any] = {"train_dataset": Counting(), "data_collator": collate}
    trainer = adaptive(Trainer)(tiny_llama(), arguments(folder, max_steps=1), adaptive=AS_IT_IS, **options)
    trainer.train()
    assert type(trainer).__name__ == "AdaptiveTrainer"
    assert trainer.state.log_history[0]["microbatch_rows"] == 4


def test_adaptive_takes_arguments_for_trainers_that_other_code_constructs(folder: Path) -> None:
    base = adaptive(Trainer, memory_limit="1GiB", regrow_after=3)
    trainer, other = adaptive(base, regrow_after=5)(tiny_llama(), arguments(folder)), AdaptiveTrainer(tiny_llama())
    assert trainer.adaptive == AdaptiveArguments(memory_limit="1GiB", regrow_after=5)
    assert other.adaptive == AdaptiveArguments()
    with pytest.raises(ConfigError, match="memory_limit"):
        adaptive(Trainer, memory_limit="much")


def test_training_step_that_does_not_call_trainers_is_refused(folder: Path) -> None:
    class Own(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            return model(**inputs).loss.detach()

    with pytest.raises(ConfigError, match=r"training_step of Adaptive does not call super\(\)"):
        train(folder, AS_IT_IS, base=Own, arguments=arguments(folder))


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


def test_neither_torchtune_nor_torchao_is_needed() -> None:
    without = "import sys; sys.modules |= dict.fromkeys(['torchtune', 'torchao']); import torchtune_adaptive.hf"
    subprocess.run([sys.executable, "-c", without], check=True, timeout=100)


def test_search_on_a_cpu_requires_a_memory_limit(folder: Path) -> None:
    with pytest.raises(AdaptiveError, match="set memory_limit"):
        train(folder, AdaptiveArguments(use_maximum_batch_size=True), arguments=arguments(folder))


def test_token_budget_counts_the_tokens_of_a_collator_that_tokenizes(folder: Path) -> None:
    class Texts(Counting):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"text": super().__getitem__(index)}

    tokenized = {
        "train_dataset": Texts(),
        "data_collator": lambda samples: collate([sample["text"] for sample in samples]),
    }
    settings = arguments(folder, remove_unused_columns=False, max_steps=2)
    before, after = (
        train(folder, AdaptiveArguments(token_budget=100), **data, arguments=settings) for data in ({}, tokenized)
    )
    assert difference(after, before) == 0


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
