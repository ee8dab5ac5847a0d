"""Adaptive workers against SkyRL's own, without and with out-of-memory errors."""

from __future__ import annotations

import inspect
import logging
import pickle
import runpy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("skyrl")

import skyrl.backends.skyrl_train.workers.worker as skyrl_worker
import torch
import torch.distributed as dist
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import CriticWorker, PolicyWorker, RefWorker
from skyrl.train.config import SkyRLTrainConfig

from tests.fault_injection import FaultInjector
from tests.ranks import on_ranks, run_on_ranks
from tests.skyrl.sweeps import CASES, Case, Swept, pair, relative, run, same, sweep_all
from tests.skyrl.workers import IMAGE, KINDS, PROMPT, batch, gradients, use_cpus
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.engine.ranks import from_all_ranks
from torchtune_adaptive.errors import AdaptiveError, ConfigError, OneRowDoesNotFitError
from torchtune_adaptive.skyrl import adaptive, passes
from torchtune_adaptive.skyrl.passes import longest_row

pytestmark = pytest.mark.timeout(1800)
PLACES = {1: 10, 2: 100, 3: 10}
"""The operations that fail in each case, one at a time, by number of ranks."""


@pytest.fixture(scope="module", params=PLACES, ids="{} ranks".format)
def swept(request: pytest.FixtureRequest) -> list[dict[str, Swept]]:
    """The results of each rank."""
    return run_on_ranks(request.param, sweep_all, PLACES[request.param], timeout_s=600)


@pytest.mark.parametrize("name", CASES)
def test_a_pass_equals_skyrls_and_recovers_from_errors(swept: list[dict[str, Swept]], name: str) -> None:
    for of_rank in (each[name] for each in swept):
        assert of_rank.bitwise
        assert of_rank.metrics_bitwise
        assert of_rank.recovered == of_rank.injected == PLACES[len(swept)]
        assert of_rank.difference < 5e-7


@pytest.mark.parametrize("name", CASES)
def test_collectives_of_a_pass_do_not_depend_on_its_microbatches(swept: list[dict[str, Swept]], name: str) -> None:
    """The ranks agree once at the end. Under a limit by tokens, an agreement at the beginning replaces SkyRL's."""
    for configured, smaller in (each[name].added_collectives for each in swept):
        assert configured == smaller <= 1


on_cpus = partial(on_ranks, timeout_s=120, setup=use_cpus)


@on_cpus(2)
def test_gradients_add_up_over_batches_before_an_update() -> None:
    """Tinker calls `forward_backward` several times before `optim_step`."""
    for case in (CASES["policy"], CASES["critic"]):
        stock, ours = pair(case)
        for made in (stock, ours):
            run(made, case)
            made.forward_backward(batch(seed=8))
        assert all(map(torch.equal, gradients(ours), gradients(stock)))
        for made in (stock, ours):
            run(made, case)
        with FaultInjector(ours.passes.runners["forward_backward"]).fail_at(rank=1, step=4, operation=50):
            for made in (stock, ours):
                made.forward_backward(batch(seed=8))
        assert ours.passes.runners["forward_backward"].recoveries == 1
        for made in (stock, ours):
            made.optim_step()
        weights = [[each.to_local() for each in made.model.parameters()] for made in (ours, stock)]
        assert relative(*weights) < 1e-6


@on_cpus(1)
def test_a_pass_counts_the_memory_that_other_processes_held_in_earlier_passes() -> None:
    known: list[Any] = []
    memory = MemoryMeter(2**40)

    def within(*arguments: Any) -> AbstractContextManager[Any]:
        known.append(dict(enumerate(arguments)).get(3))
        return nullcontext(memory)

    _, ours = pair(CASES["policy"])
    with mock.patch.object(passes, "memory_within", within):
        for _ in range(2):
            run(ours, CASES["policy"])
    assert known == [None, memory]


@pytest.mark.parametrize("name", ["policy, entropy bonus", "policy, entropy bonus by tokens", "critic, 3 of 8 rows"])
@on_cpus(2)
def test_losses_that_depend_on_microbatches_are_exact_after_an_error(name: str) -> None:
    stock, ours = pair(case := CASES[name])
    data = batch(seed=2 + dist.get_rank())
    expected, _ = run(stock, case, data), run(ours, case, data)
    runner = ours.passes.runners["forward_backward"]
    state, size = runner.state_dict(), runner.limit.size
    for divisor in (1.4, 2, 10):  # some sizes do not divide the configured microbatch
        runner.load_state_dict({**state, "size": max(1, int(size / divisor))})
        assert relative(run(ours, case, data).gradients, expected.gradients) < 1e-6
        assert len(ours.passes.plan) > expected.metrics.get("num_microbatches", 2)


@on_cpus(1)
def test_losses_that_select_tokens_of_a_microbatch_are_reported() -> None:
    reports = logs()
    case = Case("policy", overrides=("trainer.algorithm.policy_loss_type=kl_cov",))
    _, ours = pair(case)
    run(ours, case)
    assert reports == []
    with FaultInjector(ours.passes.runners["forward_backward"]).fail_at(rank=0, step=2, operation=50):
        run(ours, case)
    run(ours, case)
    [report] = reports
    assert "the loss kl_cov (trainer.algorithm.policy_loss_type)" in report


@pytest.mark.parametrize("name", ["policy, entropy bonus by tokens", "critic, by tokens", "policy forward, by tokens"])
@on_cpus(2)
def test_ranks_with_different_numbers_of_microbatches_equal_skyrls(name: str) -> None:
    stock, ours = pair(case := CASES[name])
    data = batch(seed=2 + dist.get_rank())  # other lengths on each rank
    expected, ran = run(stock, case, data), run(ours, case, data)
    padding = torch.tensor([float(() in ours.passes.plan)])
    dist.all_reduce(padding)
    assert padding.item() == 1, "SkyRL adds microbatches of padding on one rank"
    assert same(ran, expected)


@on_cpus(2)
def test_out_of_memory_after_the_microbatches_is_recovered_on_all_ranks() -> None:
    stock, ours = pair(CASES["policy"])
    reduce, fails = skyrl_worker.reduce_metrics, iter([dist.get_rank() == 1])

    def reduce_metrics(*args: Any, **kwargs: Any) -> Any:
        if next(fails, False):
            raise torch.OutOfMemoryError("injected")
        return reduce(*args, **kwargs)

    expected = run(stock, CASES["policy"])
    with mock.patch.object(skyrl_worker, "reduce_metrics", reduce_metrics):
        ran = run(ours, CASES["policy"])
    assert ran.metrics["oom_recoveries"] == 1
    assert relative(ran.gradients, expected.gradients) < 1e-6


@on_cpus(2)
def test_an_empty_batch_does_what_skyrl_does() -> None:
    for case in (CASES["policy"], CASES["critic"]):
        assert same(*(run(made, case, batch(0)) for made in pair(case)))


@on_cpus(2)
def test_rows_longer_than_the_budget_run_alone() -> None:
    case = Case("policy", overrides=("trainer.max_tokens_per_microbatch=5",))
    stock, ours = pair(case)
    expected, ran = run(stock, case), run(ours, case)
    assert ran.metrics["num_microbatches"] == 8  # as many as rows
    assert same(ran, expected)


SEARCHED = {"max_prompt_length": 12, "max_generate_length": 20}
"""Twice as long as the rows of a batch."""


@pytest.mark.parametrize(("kind", "expected_rows"), [("policy", 4), ("critic", 8)])
@on_cpus(2)
def test_search_finds_the_rows_that_fit_on_the_rank_with_the_least_memory(kind: str, expected_rows: int) -> None:
    limit = ("4MiB", "2MiB")[dist.get_rank()]
    case, logged = CASES[kind], logs()
    stock, ours = pair(case, use_maximum_batch_size=True, memory_limit=limit, **SEARCHED)
    data = batch(32)
    before = [each.to_local().clone() for each in ours.model.parameters()]
    output = ours.forward_backward(data)
    assert all(map(torch.equal, before, [each.to_local() for each in ours.model.parameters()]))
    assert not ours.optimizer.state
    rows = ours.cfg.micro_train_batch_size_per_gpu
    assert output.metrics["microbatch_rows"] == rows == expected_rows
    shown = [line for line in logged if f"trainer.micro_train_batch_size_per_gpu={rows}" in line]
    assert len(shown) == (dist.get_rank() == 0)
    stock.cfg.micro_train_batch_size_per_gpu = rows
    expected = stock.forward_backward(data)
    assert relative(gradients(ours), gradients(stock)) < 1e-6
    assert {name: output.metrics[name] for name in expected.metrics} == pytest.approx(expected.metrics, rel=1e-6)
    # the longest rows fit in microbatches of this size, but not in larger ones
    longest = longest_row(data, ours.arguments, padded=True)
    longest = TrainingInputBatch({name: each.expand(32, -1) for name, each in longest.items()})
    longest.metadata = {"response_length": SEARCHED["max_generate_length"]}
    runner = ours.passes.runners["forward_backward"]
    ours.forward_backward(longest)
    assert runner.recoveries == 0
    ours.passes._limits["forward_backward"] = RowLimit(2 * rows + 8)
    runner.use_limit(RowLimit(2 * rows + 8))
    ours.forward_backward(longest)
    assert runner.recoveries > 0


@on_cpus(2)
def test_search_with_images_measures_the_largest_image() -> None:
    case = CASES["policy, images"]
    _, ours = pair(case, use_maximum_batch_size=True, memory_limit="3MiB", **SEARCHED)
    data = batch(32, images=True)
    data["pixel_values"].tensors[5] = data["pixel_values"][5].repeat(2, 1)  # an image of twice the size
    data["image_grid_thw"].tensors[5] = torch.tensor([[1, 4, 4]])
    data["sequences"][5, PROMPT - 5 : PROMPT] = torch.tensor([IMAGE + 1, *[IMAGE] * 4])
    data["attention_mask"][5, PROMPT - 5 : PROMPT] = 1
    assert len(longest_row(data, ours.arguments, padded=True)["pixel_values"][0]) == 16
    output = ours.forward_backward(data)
    assert output.metrics["oom_recoveries"] == 0
    first, second = from_all_ranks(output.metrics["microbatch_rows"])
    assert first == second
    assert 1 < first < 32


def logs() -> list[str]:
    """Return a list that gets the log lines of workers from now on."""
    logging.disable(logging.NOTSET)
    lines: list[str] = []
    logger = logging.getLogger("torchtune_adaptive.skyrl.passes")
    logger.setLevel(logging.INFO)
    logger.addFilter(lambda record: lines.append(record.getMessage()))
    return lines


@on_cpus(1)
def test_search_finds_a_token_budget_that_allows_more_short_rows() -> None:
    lines = logs()
    _, ours = pair(CASES["policy"], token_budget="auto", memory_limit="2MiB", **SEARCHED)
    output = ours.forward_backward(batch(64))
    assert output.metrics["oom_recoveries"] == 0
    budget = output.metrics["microbatch_tokens"]
    assert 4 * 32 <= budget < 16 * 32
    # rows of the batch have 16 tokens, the longest would have 32
    assert max(map(len, ours.passes.plan)) == budget // 16
    assert any(f"token_budget={budget} (padding included)" in line for line in lines)


@on_cpus(1)
def test_errors_name_keys_of_skyrl_and_can_be_sent_between_processes() -> None:
    case = CASES["policy"]

    def fail(named: str, **arguments: Any) -> None:
        _, ours = pair(case, **arguments)
        with pytest.raises(AdaptiveError) as caught:
            ours.forward_backward(batch())
        assert named in str(caught.value) == str(pickle.loads(pickle.dumps(caught.value)))

    searched = {"use_maximum_batch_size": True, "memory_limit": "300KiB", **SEARCHED}
    fail("generator.sampling_params.max_generate_length", **searched)
    _, ours = pair(case, **searched)
    with pytest.raises(OneRowDoesNotFitError):
        ours.forward_backward(batch())
    ours.arguments = ours.passes._arguments = replace(ours.arguments, memory_limit="4MiB")
    assert ours.forward_backward(batch()).metrics["microbatch_rows"] > 1, "the next call searches again"
    fail("trainer.gradient_checkpointing=true", memory_limit="250KiB")
    fail("memory_limit to adaptive()", use_maximum_batch_size=True, **SEARCHED)
    _, ours = pair(case)
    ours.forward_backward(batch())
    before = [each.grad.clone() for each in ours.model.parameters() if each.grad is not None]
    ours.arguments = replace(ours.arguments, memory_limit="250KiB")
    ours.passes._arguments = ours.arguments
    with pytest.raises(AdaptiveError):
        ours.forward_backward(batch())
    after = [each.grad for each in ours.model.parameters() if each.grad is not None]
    assert all(map(torch.equal, before, after)), "gradients of earlier calls are kept"
    _, ours = pair(case)
    ours.sequence_parallel_size = 2
    with pytest.raises(ConfigError, match="sequence_parallel_size is 2"):
        ours.forward_backward(batch())
    _, ours = pair(case, memory_limit="250KiB", recover_from_oom=False)
    with pytest.raises(torch.OutOfMemoryError):
        ours.forward_backward(batch())


def test_adaptive_refuses_other_classes_and_unknown_arguments() -> None:
    with pytest.raises(TypeError, match="pass a PolicyWorker"):
        adaptive(dict)
    with pytest.raises(ConfigError, match="unknown argument 'rows'"):
        adaptive(KINDS["policy"], rows=1)
    with pytest.raises(ConfigError, match="max_generate_length"):
        adaptive(KINDS["policy"], use_maximum_batch_size=True, max_prompt_length=12)
    with pytest.raises(ConfigError, match="max_prompt_length: '12' is invalid"):
        adaptive(KINDS["policy"], max_prompt_length="12")
    made = adaptive(KINDS["policy"], regrow_after=5)
    assert adaptive(KINDS["policy"], regrow_after=5) is made
    assert adaptive(KINDS["policy"], {"regrow_after": 5}) is made
    assert adaptive(made, recover_from_oom=False).arguments.regrow_after == 5


def test_example_passes_adaptive_workers_to_skyrls_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    example, built = runpy.run_path("examples/skyrl_workers.py"), []
    trainer, cfg = example["Trainer"], SkyRLTrainConfig.from_cli_overrides([])
    monkeypatch.setattr(trainer.__base__, "build_models", lambda _, *workers: built.extend(workers))
    made = object.__new__(trainer)
    made.cfg = cfg
    made.build_models(PolicyWorker, CriticWorker, RefWorker)
    classes = [each.__ray_metadata__.modified_class.__mro__[1] for each in built]
    assert [each.__name__ for each in classes] == [
        f"AdaptiveFSDP{kind}WorkerBase" for kind in ("Policy", "Critic", "Ref")
    ]
    assert all(each._default_options == {"num_gpus": 1} for each in built)
    assert {each.arguments.max_prompt_length for each in classes} == {cfg.trainer.max_prompt_length}
    parts = dict.fromkeys(inspect.signature(example["BasePPOExp"].get_trainer).parameters)
    monkeypatch.setattr(trainer.__base__, "__init__", lambda *_, **parts: None)
    assert type(example["Experiment"].get_trainer(*[parts.pop("self")], **parts)) is trainer
