"""AdaptiveTrainer against torchtitan's own Trainer, without and with out-of-memory errors."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torchtitan.components.validate import Validator
from torchtitan.config import ConfigManager
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from tests.fault_injection import FaultInjector
from tests.ranks import on_ranks, run_on_ranks
from tests.titan.sweep import CASES, sweep
from tests.titan.trainers import TOKENS, RandomTokens, build, config, pair, relative, same, step, use_cpus
from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.errors import ConfigError, LimitExhaustedError
from torchtune_adaptive.titan import AdaptiveTrainer, adaptive

pytestmark = pytest.mark.timeout(1800)
PLACES = 3
"""The number of operations that fail in each case, one at a time."""


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_torchtitans_and_recovers_from_errors(name: str) -> None:
    for of_rank in run_on_ranks(CASES[name].ranks, sweep, name, PLACES, timeout_s=120):
        assert of_rank.bitwise or name == "HSDP, 2 batches"  # FSDP adds gradients over replicas only once
        assert of_rank.added_collectives <= 1
        assert of_rank.recovered == of_rank.injected == PLACES
        assert of_rank.difference < 1e-6


on_cpus = partial(on_ranks, timeout_s=120, setup=use_cpus)


def fail(trainer: Any, rank: int = 0, operation: int = 300, times: int = 1) -> FaultInjector:
    """Fail an operation of the next step."""
    injector = FaultInjector(trainer.runner)
    return injector.fail_at(rank=rank, step=trainer.step + 1, operation=operation, times=times)


@pytest.mark.parametrize(
    "operation", [20, 300, 600]
)  # in the layers, in the chunked loss, in the backward of the layers
@on_cpus(2)
def test_an_error_before_any_complete_microbatch_is_recovered(operation: int) -> None:
    stock, ours = pair()
    with fail(ours, rank=1, operation=operation):
        gradients = step(ours)
    assert ours.runner.recoveries == 1
    assert relative(gradients, step(stock)) < 1e-6


@on_cpus(2)
def test_after_an_error_training_continues_bitwise_as_torchtitan_with_smaller_batches() -> None:
    ours, stock = build(adaptive(config(rows=4))), build(config(rows=2, batches=2))
    rows = RandomTokens(None, dp_rank=dist.get_rank(), seq_len=TOKENS, local_batch_size=4)
    halves = (
        ({name: each[part] for name, each in inputs.items()}, labels[part])
        for inputs, labels in rows
        for part in (slice(0, 2), slice(2, 4))
    )
    stock.dataloader = halves
    with fail(ours):
        assert all(same(step(ours), step(stock)) for _ in range(3))
    assert ours.runner.limit.size == 2
    assert ours.ntokens_seen == stock.ntokens_seen
    assert same(weights(ours), weights(stock))


@on_cpus(2)
def test_repeated_steps_count_each_token_of_experts_once() -> None:
    counted = []
    for trainer in pair("deepseek"):
        step(trainer, 0, update=False)
        counters = [each for name, each in trainer.model_parts[0].named_buffers() if "tokens_per_expert" in name]
        for each in counters:
            each.zero_()
        with fail(trainer, operation=900) if isinstance(trainer, AdaptiveTrainer) else nullcontext():
            step(trainer, 0, update=False)
        counted.append(counters)
    assert trainer.runner.recoveries == 1
    assert counted[0][0].sum()
    assert same(*counted)


def train(folder: str, steps: int, *flags: str, stock: bool = False, fails_in: int = 0) -> Any:
    """Collective: train as `torchtitan.train` does, on a global batch of 8 rows, with checkpoints in the folder."""
    module = ["--module", "tests.titan.test_trainer", "--config", "tiny"]
    if not stock:
        module = ["--module", "torchtune_adaptive.titan", "--config", "tests.titan.test_trainer.tiny"]
    made = ConfigManager().parse_args([*module, "--dump_folder", folder, "--training.steps", str(steps), *flags])
    trainer = build(made)
    with FaultInjector(trainer.runner).fail_at(rank=0, step=fails_in, operation=300) if fails_in else nullcontext():
        trainer.train()
    trainer.close()
    return trainer


def tiny() -> Any:
    made = config(rows=4, dp=2)
    made.checkpoint = replace(made.checkpoint, enable=True, last_save_model_only=False)
    made.metrics = replace(made.metrics, log_freq=1, enable_tensorboard=True)
    return made


def weights(trainer: Any) -> list[Tensor]:
    return [each.full_tensor().clone() for each in trainer.model_parts[0].parameters()]


def test_checkpoints_contain_the_limit_for_any_number_of_ranks(tmp_path: Path) -> None:
    assert run_on_ranks(2, _train_once, str(tmp_path), 3, timeout_s=120) == [(2, 1)] * 2
    fewer = "--training.global_batch_size", "4"
    assert run_on_ranks(1, _train_once, str(tmp_path), 0, *fewer, timeout_s=120) == [(2, 1)]


def _train_once(folder: str, fails_in: int, *flags: str) -> tuple[int, int]:
    use_cpus()
    trainer = train(folder, 4 if fails_in else 5, *flags, fails_in=fails_in)
    return trainer.runner.limit.size, trainer.runner.recoveries


@on_cpus(2)
def test_checkpoints_of_torchtitan_can_be_continued_and_the_other_way_round(tmp_path: Path) -> None:
    ended = []
    for name, alternates in (("stock", False), ("both", True)):
        for number in range(3):
            last = train(f"{tmp_path}/{name}", number + 2, stock=not alternates or number != 1)
        ended.append(weights(last))
    assert last.step == 4
    assert same(*ended)


def test_metrics_and_log_contain_recoveries_and_the_limit(tmp_path: Path) -> None:
    [lines, _] = run_on_ranks(2, _log, str(tmp_path), timeout_s=120)
    assert lines[0] == "steps recover from out-of-memory errors: at most 4 rows in a microbatch"
    assert [line for line in lines if "out of memory" in line] == [
        "step 2: out of memory on rank 0 (longest sample 32 tokens): microbatch 4 -> 2 rows, step repeated"
    ]
    events = EventAccumulator(str(next(tmp_path.rglob("events*")).parent)).Reload()
    assert [each.value for each in events.Scalars("oom_recoveries")] == [0, 1, 1]
    assert [each.value for each in events.Scalars("microbatch_rows")] == [4, 2, 2]
    assert events.Scalars("loss_metrics/global_avg_loss")


def _log(folder: str) -> list[str]:
    use_cpus()
    lines = logs()
    train(folder, 3, fails_in=2)
    return lines


def logs() -> list[str]:
    """Return a list that gets the log lines of this package from now on."""
    logging.disable(logging.NOTSET)
    lines: list[str] = []
    for name in ("titan.trainer", "engine.step"):
        logger = logging.getLogger(f"torchtune_adaptive.{name}")
        logger.setLevel(logging.INFO)
        logger.addFilter(lambda record: lines.append(record.getMessage()))
    return lines


@on_cpus(2)
def test_validation_after_an_error_equals_torchtitans() -> None:
    losses: list[list[float]] = []
    for trainer in pair(rows=4, validator=Validator.Config(enable=True, steps=2, dataloader=RandomTokens.Config())):
        found: list[float] = []
        trainer.validator.metrics_processor.log_validation = lambda *, loss, step, found=found: found.append(loss)
        for number in range(2):
            with fail(trainer) if number and isinstance(trainer, AdaptiveTrainer) else nullcontext():
                step(trainer)
            trainer.validator.validate(trainer.model_parts, trainer.step)
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][0] == losses[1][0]


PIPELINE = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "1F1B"}


@pytest.mark.parametrize(
    ("settings", "other_input", "reason"),
    [
        ({**PIPELINE, "dp": 1, "chunked": False}, "", "the schedule of a pipeline runs all microbatches"),
        ({"batches": 2}, "pixels", "the batches cannot be divided by rows, because of pixels"),
    ],
)
@on_cpus(2)
def test_steps_that_cannot_be_split_run_without_recovery_and_the_log_says_why(
    settings: dict[str, Any], other_input: str, reason: str
) -> None:
    lines = logs()
    stock, ours = pair(**settings)
    for trainer in (stock, ours) if other_input else ():
        inner = trainer.post_dataloading_process
        trainer.post_dataloading_process = lambda inputs, labels, inner=inner: inner(
            {name: each for name, each in inputs.items() if name != other_input}, labels
        )
        trainer.dataloader.other_input = other_input
    assert all(same(step(ours), step(stock)) for _ in range(2))
    assert ours.runner is None
    if dist.get_rank() == 0:
        assert any("without recovery" in line and reason in line for line in lines)


class OwnStep(AdaptiveTrainer):
    @dataclass(kw_only=True, slots=True)
    class Config(AdaptiveTrainer.Config):
        pass

    def train_step(self, data_iterator: Any) -> None:
        Trainer.train_step(self, data_iterator)


class OwnPass(AdaptiveTrainer):
    @dataclass(kw_only=True, slots=True)
    class Config(AdaptiveTrainer.Config):
        pass

    def forward_backward_step(self, **batch: Any) -> Any:
        return self._forward_backward(*batch.values())


@on_cpus(1)
def test_trainers_that_do_not_call_this_one_train_as_torchtitan_without_recovery() -> None:
    lines = logs()
    stock, ours = pair(batches=3, rows=2)
    expected = step(stock)
    for own, method in (OwnStep, "train_step"), (OwnPass, "forward_backward_step"):
        made = build(own.Config(**{each.name: getattr(ours.config, each.name) for each in fields(ours.config)}))
        made.model_parts[0].load_state_dict(ours.model_parts[0].state_dict())
        assert relative(step(made), expected) < 1e-6
        assert made.runner is None
        assert made.dataloader.taken == 3
        assert f"{method} of {own.__name__} does not call" in lines[-1]


@on_cpus(2)
def test_search_finds_the_rows_that_fit_on_the_rank_with_the_least_memory() -> None:
    lines = logs()
    limit = ("48MiB", "32MiB")[dist.get_rank()]
    arguments = {"use_maximum_batch_size": True, "memory_limit": limit}
    stock, ours = pair(rows=16, arguments=arguments)
    before = weights(ours)
    gradients, expected = step(ours, update=False), step(stock, update=False)
    assert same(before, weights(ours))
    assert relative(gradients, expected) < 1e-6
    assert ours.runner.recoveries == 0
    assert sum("batch search" in line for line in lines) == (dist.get_rank() == 0)
    first, second = from_all_ranks(ours.runner.limit.size)
    assert first == second
    assert first in (2, 4, 8)


@on_cpus(1)
def test_errors_name_flags_of_torchtitan() -> None:
    ours = build(adaptive(config(rows=1, training__disable_cuda_graphs=False)))
    assert ours.config.training.disable_cuda_graphs
    with pytest.raises(LimitExhaustedError, match=r"lower --training\.seq_len"), fail(ours, times=5):
        step(ours)
    with pytest.raises(ConfigError, match=r"--adaptive\.memory_limit, for example 8GiB"):
        build(adaptive(config(), use_maximum_batch_size=True))


def test_command_line_takes_any_config_of_torchtitan_and_arguments_as_flags(capsys: pytest.CaptureFixture[str]) -> None:
    module = ["--module", "torchtune_adaptive.titan", "--config"]
    for name in ("llama3_debugmodel", "sft_debugmodel", "qwen3_moe_debug", "deepseek_v3_16b"):
        made = ConfigManager().parse_args([*module, name, "--adaptive.regrow_after", "7"])
        assert type(made) is AdaptiveTrainer.Config
        assert made.adaptive.regrow_after == 7
    for wrong, message in {
        "llama3_debugmodl": r"no 'llama3_debugmodl' in the models of torchtitan; similar: llama3_debugmodel",
        "math.nothing": "no 'nothing' in math",
        "nowhere.mine": r"nowhere cannot be imported \(No module named 'nowhere'\)",
    }.items():
        with pytest.raises(ConfigError, match=message):
            ConfigManager().parse_args([*module, wrong])
    with pytest.raises(SystemExit):
        ConfigManager().parse_args([*module, "llama3_debugmodel", "--adaptive.memory_limit", "much"])
    assert "memory_limit: cannot read 'much'" in capsys.readouterr().err


class OtherTrainer(Trainer):
    """Like those of Flux and torchft."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass


def test_adaptive_keeps_the_config_and_refuses_other_trainers() -> None:
    own = llama3_debugmodel()
    made = adaptive(own, regrow_after=5)
    assert all(getattr(made, each.name) is getattr(own, each.name) for each in fields(own))
    assert adaptive(made, recover_from_oom=False).adaptive == replace(made.adaptive, recover_from_oom=False)
    with pytest.raises(TypeError, match=r"adaptive\(\) got a OtherTrainer.Config"):
        adaptive(OtherTrainer.Config())
    with pytest.raises(ConfigError, match="unknown argument 'rows'"):
        adaptive(own, rows=1)
    with pytest.raises(ConfigError, match="unknown argument 'token_budget'; allowed: recover_from_oom"):
        adaptive(own, token_budget="auto")
