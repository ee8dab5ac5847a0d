"""Compare Trainer with and without the mixin on two gloo ranks, under FSDP2 and DDP."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer, default_data_collator
from transformers.distributed import DistributedConfig

from tests.distributed.faults.scenarios import SCENARIOS
from tests.distributed.faults.sweeps import sweep
from tests.hf.test_one_process import Stream
from tests.hf.trainers import (
    LONGEST,
    RANKS,
    Counting,
    arguments,
    changing_loss,
    difference,
    failing_in_forward,
    on_joining_ranks,
    on_ranks_of_placement,
    tiny_llama,
    train,
    use_fsdp2,
)
from tests.ranks import RankFailed, on_ranks, run_on_ranks
from torchtune_adaptive.engine.messages import Listener
from torchtune_adaptive.errors import RecoveryUnsupportedError
from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveTrainer

pytestmark = pytest.mark.timeout(600)


SHARDED = pytest.mark.parametrize("sharded", [True, False], ids=["FSDP2", "DDP"])


@SHARDED
@on_joining_ranks(2)
def test_loss_that_communicates_equals_that_of_stock(sharded: bool, tmp_path: Path) -> None:
    """The loss gathers a factor or the number of labels; or the forward updates a buffer; or a stream ends within a
    step and runs out of memory in its rest."""

    def gathers(trainer: Any, loss: Any) -> Any:
        factor = torch.tensor(1.0 + trainer.args.process_index)
        return loss * trainer.accelerator.gather(factor).mean() * trainer.accelerator.reduce(factor, "sum")

    class GlobalMean(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            local = (inputs["labels"] != -100).sum()
            return super().compute_loss(model, inputs) * local / self.accelerator.gather(local).sum()

    class Counts(type(tiny_llama())):  # type: ignore[misc]
        def forward(self, input_ids: Any, **options: Any) -> Any:
            output = super().forward(input_ids=input_ids, **options)
            output["loss"] = output["loss"] * (1 + self.seen)
            if self.training:
                self.seen += input_ids.sum() / 1e5
            return output

    def counting() -> Any:
        model = tiny_llama()
        model.register_buffer("seen", torch.zeros(()))
        model.__class__ = Counts
        return model

    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "gathers": lambda: {"base": changing_loss(gathers)},
        "global mean": lambda: {"base": GlobalMean},
        "buffer": lambda: {"model": counting()},
        "stream": lambda: {"train_dataset": Stream(26)},
        "stream, failure": lambda: {"train_dataset": Stream(26), "faults": [(3, 40)]},
    }
    if sharded:
        use_fsdp2()
        del cases["buffer"]
    plain = arguments(tmp_path, max_steps=3, gradient_accumulation_steps=2, remove_unused_columns=False)
    undispatched = arguments(tmp_path, accelerator_config={"dispatch_batches": False})
    for name, case in cases.items():
        settings = undispatched if name.startswith("stream") else plain
        ours, stock = (train(tmp_path, each, **case(), arguments=settings) for each in (AdaptiveArguments(), None))
        assert difference(ours, stock) < 1e-6, name
        assert ours.column("oom_recoveries")[-1] == 2 * ("failure" in name), "one in the rest, one in its step"


@SHARDED
@on_joining_ranks(2)
def test_ranks_with_batches_of_different_sizes_train_like_stock_until_memory_runs_out(
    sharded: bool, tmp_path: Path
) -> None:
    if sharded:
        use_fsdp2()
    options = arguments(tmp_path, max_steps=2, per_device_train_batch_size=8 if os.environ["RANK"] == "0" else 1)
    ours, stock = (train(tmp_path, adaptive, arguments=options) for adaptive in (AdaptiveArguments(), None))
    assert difference(ours, stock) < 1e-6
    with pytest.raises(RecoveryUnsupportedError, match="batches of different sizes"):
        train(tmp_path, AdaptiveArguments(), faults=[(2, 40)], arguments=options)


def refuses_short_rows(features: Any) -> Any:
    if any(len(each["input_ids"]) < LONGEST for each in features):
        raise ValueError("a row lacks its last tokens")
    return default_data_collator(features)


@on_joining_ranks(2)
def test_rank_whose_last_batch_is_smaller_joins_the_check_of_the_loss_under_ddp(tmp_path: Path) -> None:
    """In the last of four steps, rank 1 has 2 rows and rank 0 has 4. It is the second step that rank 0 splits, so it is
    checked."""
    settings = arguments(
        tmp_path, max_steps=4, gradient_accumulation_steps=1, accelerator_config={"even_batches": False}
    )
    data = {"train_dataset": Counting(30), "arguments": settings}
    ours = train(tmp_path, AdaptiveArguments(), faults=[(2, 40)], **data)
    assert ours.column("microbatch_rows") == [4, 2, 2, 2]
    assert difference(ours, train(tmp_path, **data)) < 1e-6


@SHARDED
@on_joining_ranks(2)
def test_data_collator_that_does_not_pad_trains_like_stock(sharded: bool, tmp_path: Path) -> None:
    """Rows have one length, as packing makes them. If a collator refuses shortened rows, the loss cannot be checked, so
    an out-of-memory error cannot be recovered."""
    if sharded:
        use_fsdp2()
    rows = [[*range(start, start + LONGEST)] for start in range(1, 97)]
    data: dict[str, Any] = {"train_dataset": [{"input_ids": row, "labels": row} for row in rows]}
    settings = arguments(tmp_path, max_steps=2, gradient_accumulation_steps=1)
    stock = train(tmp_path, arguments=settings, data_collator=default_data_collator, **data)
    for collator, faults in (default_data_collator, [(2, 40)]), (refuses_short_rows, []):
        ours = train(tmp_path, AdaptiveArguments(), arguments=settings, data_collator=collator, faults=faults, **data)
        assert difference(ours, stock) < 1e-6
        assert ours.column("oom_recoveries")[-1] == len(faults)
    with pytest.raises(RecoveryUnsupportedError, match="could not collate"):
        train(
            tmp_path,
            AdaptiveArguments(),
            arguments=settings,
            data_collator=refuses_short_rows,
            faults=[(2, 40)],
            **data,
        )


def fail_in_a_loss_that_communicates(batch_size: int, here: Path) -> None:
    """Collective: rank 1 runs out of memory in the first step, and its peer gathers a value in compute_loss."""

    class Gathers(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and self.args.process_index == 1:
                raise torch.OutOfMemoryError("injected")
            loss = super().compute_loss(*args, **kwargs)
            self.accelerator.gather(loss.detach())
            return loss

    settings = arguments(here, max_steps=1, per_device_train_batch_size=batch_size)
    train(here, AdaptiveArguments(), base=Gathers, arguments=settings)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_out_of_memory_error_in_a_loss_that_communicates_ends_the_first_step(batch_size: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="RecoveryUnsupportedError: out of memory on rank 1"):
        run_on_ranks(2, fail_in_a_loss_that_communicates, batch_size, tmp_path, in_group=False, timeout_s=60)


@pytest.mark.parametrize("placement", RANKS)
@on_ranks_of_placement(timeout_s=300)
def test_out_of_memory_error_in_any_forward_pass_does_not_change_training(placement: str, tmp_path: Path) -> None:
    """In training or evaluation, or in the check of the loss."""
    if placement == "FSDP2":
        use_fsdp2()

    def run(adaptive: AdaptiveArguments | None, base: type) -> Any:
        evaluates = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
        settings = arguments(tmp_path, max_steps=3, gradient_accumulation_steps=2, **evaluates)
        return train(tmp_path, adaptive, base=base, eval_dataset=Counting(16 * RANKS[placement]), arguments=settings)

    stock = run(None, Trainer)
    every = int(os.environ.get("TORCHTUNE_ADAPTIVE_EVERY", "4"))
    for number in range(1, 25, every):  # 3 passes of the check, 6 of training and 12 of evaluation, and repeated ones
        assert difference(run(AdaptiveArguments(), failing_in_forward(Trainer, number)), stock) < 1e-6, number


@pytest.mark.parametrize(("name", "most"), [("Trainer, FSDP2", 85), ("Trainer, DDP", 42)])
def test_failure_at_any_operation_of_a_step_does_not_change_training(name: str, most: int) -> None:
    found, same = run_on_ranks(2, sweep, SCENARIOS[name], most, timeout_s=100)
    assert found == same
    assert found.all_recovered
    assert found.injected > 15


class OfReference(Trainer):
    """As in DPO, the loss of each row is the same while the model equals a copy of itself."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.model_accepts_loss_kwargs = False
        policy, reference = (self.of_rows(each, inputs) for each in (model, self.reference))
        return -torch.nn.functional.logsigmoid(reference - policy).mean()

    def of_rows(self, model: Any, inputs: Any) -> Any:
        logits, labels = model(inputs["input_ids"], inputs["attention_mask"]).logits, inputs["labels"]
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
        return losses.sum(-1)


@pytest.mark.parametrize("placement", RANKS)
@on_ranks_of_placement()
def test_loss_that_is_equal_for_all_rows_at_the_start_is_checked_with_other_weights(
    placement: str, tmp_path: Path
) -> None:
    """Batches are split from the first step on."""
    if placement == "FSDP2":
        use_fsdp2()
    base = type("Compared", (OfReference,), {"reference": tiny_llama().requires_grad_(False)})
    settings = arguments(tmp_path, learning_rate=1e-3)
    limits = AdaptiveArguments(token_budget=100), None
    ours, stock = (train(tmp_path, adaptive, base=base, arguments=settings) for adaptive in limits)
    assert difference(ours, stock) < 1e-5


CHECKPOINTED = {"gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 1}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}


def train_until_rank_1_is_killed(sharded: bool, here: Path) -> None:
    """Collective: kills rank 1 in the backward of the fifth step, after a failure and a checkpoint."""

    def is_killed(trainer: Any, loss: Any) -> Any:
        if trainer.state.global_step == 4 and trainer.args.process_index == 1 and loss.requires_grad:
            loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return loss

    if sharded:
        use_fsdp2()
    settings = arguments(here, save_strategy="steps", save_steps=3, **(CHECKPOINTED if sharded else COMPILED))
    options: dict[str, Any] = {"faults": [(2, 40)], "failing_rank": 1, "eval_dataset": Counting(8)}
    train(here, AdaptiveArguments(), base=changing_loss(is_killed), arguments=settings, **options)


def resume_and_compare(sharded: bool, here: Path) -> tuple[float, list[float], float]:
    """Collective: the difference from an undisturbed stock run, the microbatches of each step, and all recoveries."""
    if sharded:
        use_fsdp2()
    resumed = train(here, AdaptiveArguments(), resume=str(here / "checkpoint-3"), arguments=arguments(here))
    differs = difference(resumed, train(here, arguments=arguments(here)))
    return differs, resumed.column("microbatch_rows"), resumed.column("oom_recoveries")[-1]


@pytest.mark.smoke("FSDP2")
@SHARDED
def test_run_whose_rank_1_was_killed_resumes_like_stock(sharded: bool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="SIGKILL"):
        run_on_ranks(2, train_until_rank_1_is_killed, sharded, tmp_path, in_group=False, timeout_s=60)
    for differs, rows, recoveries in run_on_ranks(
        2, resume_and_compare, sharded, tmp_path, in_group=False, timeout_s=60
    ):
        assert differs < 1e-6
        assert (rows, recoveries) == ([4, 2, 2, 2, 2, 2], 1)


@on_ranks(2)
def test_save_issues_no_collective_that_corrupts_gloos_memory(tmp_path: Path) -> None:
    """In a save of a model that transformers has sharded."""
    tiny_llama().save_pretrained(tmp_path)  # on rank 0
    torch.distributed.barrier()
    model = LlamaForCausalLM.from_pretrained(tmp_path, distributed_config=DistributedConfig(fsdp_size=2))
    trainer, found = AdaptiveTrainer(model, arguments(tmp_path), train_dataset=Counting(8)), set[str]()
    with Listener(lambda operation: found.add(operation.partition(" at ")[0])):
        trainer.save_model(str(tmp_path / "saved"))
    assert "c10d::_allgather_base_" in found
    assert "_c10d_functional::all_gather_into_tensor" not in found
