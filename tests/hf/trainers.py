"""Train a tiny Llama with transformers' Trainer, stock and adaptive, on the same samples."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.utils.logging import set_verbosity_error

from tests.fault_injection import FaultInjector
from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveMixin

LONGEST = 48
STEPS = 6


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
            each.full_tensor() if hasattr(each := parameter.detach(), "full_tensor") else each
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
