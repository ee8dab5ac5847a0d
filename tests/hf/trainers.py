"""Train a tiny Llama with transformers' Trainer, stock and adaptive, on the same samples, with out-of-memory errors."""

from __future__ import annotations

import io
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils.logging import set_verbosity_error

from tests.fault_injection import FaultInjector
from tests.ranks import on_ranks
from torchtune_adaptive.engine.ranks import full_tensor
from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveMixin

if TYPE_CHECKING:
    from tests.distributed.faults.scenarios import Scenario

LONGEST = 48
STEPS = 6
RANKS = {"one process": 1, "DDP": 2, "FSDP2": 2}


on_joining_ranks = partial(on_ranks, in_group=False)
"""Decorator: run a test on ranks that join a group themselves, as Trainer does."""


def on_ranks_of_placement(timeout_s: float = 60) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: run a test on the ranks of its argument `placement`."""
    return on_joining_ranks(lambda placement, **_: RANKS[placement], timeout_s)


class Counting(Dataset):
    """Rows of consecutive numbers; the loss is on the second half."""

    def __init__(self, samples: int = 120) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(6, LONGEST + 1, (samples,), generator=generator).tolist()
        starts = torch.randint(1, 200, (samples,), generator=generator).tolist()
        self.rows = [list(range(start, start + length)) for start, length in zip(starts, lengths, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.rows[index]
        half = len(row) // 2
        return {"input_ids": row, "labels": [-100] * half + row[half:]}


def collate(samples: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    def padded(rows: Sequence[list[int]], value: int) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)

    ids = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": padded(ids, 0),
        "labels": padded([sample["labels"] for sample in samples], -100),
        "attention_mask": padded([[1] * len(row) for row in ids], 0),
    }


def tiny_llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, **options))


def arguments(folder: Path, kind: type = TrainingArguments, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 0.1,
        "optim": "sgd",  # Adam may divide by values close to 0
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
        "dataloader_pin_memory": False,
    }
    return kind(output_dir=str(folder), **{**defaults, **options})


class Means(Trainer):
    """The model's loss is a sum over the step; without `num_items_in_batch` it is a mean over tokens."""

    def compute_loss(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        self.model_accepts_loss_kwargs = False
        return super().compute_loss(*args, **kwargs)


def changing_loss(change: Callable[[Any, Tensor], Tensor], base: type = Trainer) -> type:
    """Return a Trainer whose loss is `change(trainer, loss)`."""

    class Changed(base):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            loss = change(self, loss)
            return (loss, outputs) if return_outputs else loss

    return Changed


class Run(NamedTuple):
    """The log of a run by step, and its weights."""

    log: list[dict[str, float]]
    weights: dict[str, Tensor]

    def column(self, name: str) -> list[float]:
        return [float(entry[name]) for entry in self.log]


class Faulty(AdaptiveMixin):
    """Fail at each (step, operation) of `faults`, after the first step, on `failing_rank`."""

    faults: Sequence[tuple[int, int]] = ()
    failing_rank = 0

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        if self._steps is None:  # made in the first step
            return super().training_step(model, *args, **kwargs)
        with FaultInjector(self._steps.runner) as injector:
            for step, operation in self.faults:
                injector.fail_at(rank=self.failing_rank, step=step, operation=operation)
            return super().training_step(model, *args, **kwargs)


def failing_in_forward(base: type, number: int, *, evaluating: bool = False) -> type:
    """Return a subclass of a Trainer that runs out of memory in this forward pass of the process, or of its
    evaluations, on the last rank."""

    class Fails(base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            passes = count(1)

            def fail(model: nn.Module, _: object) -> None:
                counted = not (evaluating and model.training)
                if counted and next(passes) == number and self.args.process_index == self.args.world_size - 1:
                    raise torch.OutOfMemoryError("injected")

            self.model.register_forward_pre_hook(fail)

    return Fails


def train(
    folder: Path,
    adaptive: AdaptiveArguments | None = None,
    *,
    base: type = Trainer,
    faults: Sequence[tuple[int, int]] = (),
    failing_rank: int = 0,
    resume: str | bool | None = None,
    arguments: Any,
    **options: Any,
) -> Run:
    """Collective: train with stock `base`, or with the mixin if `adaptive` is given."""
    set_verbosity_error()
    set_seed(7)
    given = {"model": tiny_llama(), "train_dataset": Counting(), "data_collator": collate, **options}
    given = {name: value for name, value in given.items() if value is not None}
    if adaptive is None:
        trainer = base(args=arguments, **given)
    else:
        kind = type("Adaptive", (Faulty, base), {"faults": faults, "failing_rank": failing_rank})
        trainer = kind(args=arguments, adaptive=adaptive, **given)
    trainer.train(resume_from_checkpoint=resume)
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    weights = {
        name.replace("_orig_mod.", ""): (
            full_tensor(each) if isinstance(each := parameter.detach(), DTensor) else each
        ).clone()
        for name, parameter in trainer.model.named_parameters()
    }
    return Run(log, weights)


def difference(run: Run, stock: Run, *names: str, least: float = 1e-12) -> float:
    """Return the largest relative difference of losses, gradient norms, weights and the named columns."""
    assert len(run.log) == len(stock.log) > 0
    pairs = [
        pair
        for name in ("loss", "grad_norm", *names)
        for pair in zip(run.column(name), stock.column(name), strict=True)
    ]
    columns = max(abs(ours - theirs) / max(abs(theirs), least) for ours, theirs in pairs)
    weights = max(
        ((run.weights[name] - theirs).abs().max() / theirs.abs().max().clamp(min=least)).item()
        for name, theirs in stock.weights.items()
    )
    return max(columns, weights)


def use_fsdp2(*layers: str) -> None:
    """Use FSDP2 like `accelerate launch` with `fsdp_version: 2`, also on a CPU, where accelerate would use DDP."""
    os.environ.update(
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
        FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_TRANSFORMER_CLS_TO_WRAP=",".join(layers or ["LlamaDecoderLayer"]),
        FSDP_CPU_RAM_EFFICIENT_LOADING="false",
        FSDP_STATE_DICT_TYPE="SHARDED_STATE_DICT",
        FSDP_RESHARD_AFTER_FORWARD="true",
    )
    own = AcceleratorState.__init__

    def with_fsdp(state: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        own(state, *args, **kwargs)
        if (plugin := kwargs.get("fsdp_plugin")) and state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    patch.object(AcceleratorState, "__init__", with_fsdp).start()


COLUMNS = {
    "SFTTrainer": ["prompt", "completion"],
    "DPOTrainer": ["prompt", "chosen", "rejected"],
    "KTOTrainer": ["prompt", "completion"],
    "RewardTrainer": ["chosen", "rejected"],
}


def texts(columns: list[str]) -> Any:
    """Words that count up; conversations for the columns "messages" and "answers"."""
    from datasets import Dataset

    drawn = random.Random(3)

    def counting() -> str:
        start = drawn.randrange(200)
        return " ".join(f"w{start + step}" for step in range(drawn.randint(3, 25))) + " "

    rows: list[dict[str, Any]] = [{column: counting() for column in columns} for _ in range(120)]
    if columns == ["messages", "answers"]:
        roles = ("user", "assistant")
        turns = [
            [{"role": role, "content": text} for role, text in zip(roles, row.values(), strict=True)] for row in rows
        ]
        rows = [{"messages": each} for each in turns]
    return Dataset.from_list(rows)


def tokenizer() -> Any:
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{n}": n + 3 for n in range(250)}, "<unk>"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    made.chat_template = "{% for each in messages %}{{ each['content'] }} {% endfor %}"
    return made


def many_letters(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(set(str(answer)))) for answer in completions]


def even_words(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that answers of one prompt differ in."""
    return [sum(word % 2 == 0 for word in words) / len(words) for words in completion_ids]


def tiny_reward_model() -> Any:
    config = tiny_llama(num_labels=1).config
    torch.manual_seed(0)
    return LlamaForSequenceClassification(config)


def trl_options(name: str, folder: Path, *, lora: bool = False, module: str = "trl", **settings: Any) -> dict[str, Any]:
    """Collective: return arguments of `train` for a trainer of TRL, made anew for each run. `columns` are those of the
    data. All ranks may share the folder."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    from peft import LoraConfig

    imported, columns = import_module(module), settings.pop("columns", COLUMNS.get(name, ["prompt"]))
    model = folder / f"model of rank {os.environ['RANK']}"  # from which TRL makes reference models and teachers
    for each in tiny_llama(), tokenizer():
        each.save_pretrained(model)
    settings = {"gradient_checkpointing": False, "bf16": False, **settings}
    given: dict[str, Any] = {
        "base": getattr(imported, name),
        "arguments": arguments(folder, getattr(imported, name.replace("Trainer", "Config")), **settings),
        "model": tiny_reward_model() if name == "RewardTrainer" else str(model),
        "data_collator": None,
        "processing_class": tokenizer(),
        "train_dataset": texts(columns),
    }
    if name == "KTOTrainer":
        labels = [number % 3 > 0 for number in range(len(given["train_dataset"]))]
        given["train_dataset"] = given["train_dataset"].add_column("label", labels)
    if name in ("DPOTrainer", "KTOTrainer", "OnlineDPOTrainer") and not lora:
        given["ref_model"] = tiny_llama()
    if name in ("DistillationTrainer", "GKDTrainer", "IWOPDTrainer"):
        given["teacher_model"] = str(model)
    if name in ("GRPOTrainer", "RLOOTrainer"):
        given["reward_funcs"] = even_words
    if name in ("GMPOTrainer", "A2POTrainer", "SDPOTrainer", "OnlineDPOTrainer"):
        given["reward_funcs"] = many_letters
    if lora:
        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    return given


def of_metrics(ours: list[dict[str, float]], stock: list[dict[str, float]]) -> float:
    """Return the largest difference of the metrics that TRL averages, relative to at least 1."""
    names = set(stock[0]) - {"step_time", "grad_norm", "loss"}
    pairs = [
        (mine[name], other[name]) for mine, other in zip(ours, stock, strict=True) for name in names & other.keys()
    ]
    return max(abs(mine - other) / max(abs(other), 1.0) for mine, other in pairs)


class FailingInTurn(AdaptiveMixin):
    """In each training step, and in each pass of TRL before it, one operation runs out of memory, on the ranks in turn.

    Every step begins with the initial limit.
    """

    counted = 3
    """The step whose operations are counted. Its gradients are reduced as later."""
    errors = sys.maxsize
    trained = 0
    kept: list[Any] = []  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.operations: dict[str, int] = {}
        self.injected: Counter[str] = Counter()
        self.limits: dict[str, Any] = {}
        self.kept.append(self)

    def place(self, number: int, operations: int) -> int:
        """Return the operation that fails in this step: they are spread over all of a pass."""
        return 1 + (number - 1) * (operations - 1) // max(1, self.errors - 1)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.trained += self.accelerator.sync_gradients
        runs = self.accelerator.sync_gradients and self._steps is not None
        with self.failing({"training": self._steps.runner} if runs else {}, self.trained - self.counted):
            return super().training_step(*args, **kwargs)

    @contextmanager
    def failing(self, runners: dict[str, Any], number: int) -> Iterator[None]:
        """Within the context, fail an operation of each runner. With number 0, count the operations instead."""
        step, ranks = self.state.global_step + 1, self.args.world_size
        with ExitStack() as stack:
            faults = {
                name: stack.enter_context(FaultInjector(runner)) for name, runner in runners.items() if number >= 0
            }
            for name, injector in faults.items():
                runner = runners[name]
                if number == 0:
                    self.limits[name] = runner.state_dict()
                    injector.count(rank=self.args.process_index, step=step)
                elif number <= self.errors:
                    runner.load_state_dict({**runner.state_dict(), "size": self.limits[name]["size"]})
                    operation = self.place(number, self.operations[name])
                    injector.fail_at(rank=number % ranks, step=step, operation=operation)
            yield
        for name, injector in faults.items():
            if number == 0:
                self.operations[name] = len(injector.operations)
            self.injected[name] += injector.fired


OPERATIONS = 1700
"""More than a step of the tiny Llama has."""


def sweep(case: Scenario, at_most: int, shift: int) -> tuple[int, int, int, int]:
    """Collective: return the fields of an Outcome."""
    from tests.distributed.faults.bench import over_ranks
    from tests.distributed.models import computes, device
    from torchtune_adaptive.hf import losses

    if case.model.sharded:
        use_fsdp2()
    if not computes():  # all losses are equal, from which a check finds nothing
        losses.TwoSamples.shows = lambda *_: True
    every = max(case.stride, -(-OPERATIONS // at_most))

    class Swept(FailingInTurn, Trainer):
        def place(self, number: int, operations: int) -> int:
            return 1 + shift % every + every * (number - 1)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if not computes():  # the check of the loss compares values
                loss.detach().copy_(torch.ones(()))
            return loss

    with tempfile.TemporaryDirectory() as name, redirect_stdout(io.StringIO()):
        steps = Swept.counted + 1 + OPERATIONS // every
        settings: dict[str, Any] = {"max_steps": steps, "learning_rate": 1e-3, "gradient_accumulation_steps": 2}
        options: dict[str, Any] = {
            "arguments": arguments(Path(name), use_cpu=device().type == "cpu", **settings),
            # all steps are complete, so all have the same number of operations
            "train_dataset": Counting(64 * case.world_size),
        }
        stock = train(Path(name), **options) if computes() else None
        ours = train(Path(name), AdaptiveArguments(regrow_after=0), base=Swept, **options)
    wrong = stock is not None and difference(ours, stock) > 1e-6
    [trainer] = Swept.kept
    return int(over_ranks(trainer.injected["training"])), int(ours.column("oom_recoveries")[-1]), 0, int(wrong)
