"""Ranks over torch's own NCCL process groups, on null devices; `python -m tests.null.nccl` tries more cases."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_rehearsal.device import set_memory
from gpu_rehearsal.hangs.problems import problems_in
from gpu_rehearsal.hangs.replay import Replay
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.faults.scenarios import SCENARIOS
from tests.distributed.models import ModelConfig, build, device, runner_of, samples_of
from tests.null.full_card import everything_left
from tests.null.nccl import BACKENDS, swept, without_drains
from tests.null.processes import OnNull
from tests.null.recording import record_on_rank
from tests.ranks import use_next_port
from torchtune_adaptive.lifecycle.distributed import join_on

SAMPLED = 3  # operations of a step


@pytest.mark.smoke("plain-nccl-ProcessGroupNCCL2")
@pytest.mark.parametrize(
    ("name", "backend", "class_"),
    [
        ("plain", "nccl", "ProcessGroupNCCL2"),
        ("hybrid", "nccl", "ProcessGroupNCCL2"),
        ("tensor parallel and sharded", "nccl", "ProcessGroupNCCL2"),
        ("tensor parallel and sharded", "nccl-legacy", "ProcessGroupNCCL"),
    ],
)
def test_ranks_issue_equal_calls_of_nccl_without_deadlock_when_one_runs_out_of_memory(
    on_null: OnNull, name: str, backend: str, class_: str
) -> None:
    found = swept(on_null, SCENARIOS[name], backend, SAMPLED)
    assert found.backend == class_
    assert found.problems == []
    assert found.outcome == (SAMPLED, SAMPLED, 0, 0)


@pytest.mark.smoke
def test_check_finds_a_failed_rank_that_does_not_issue_what_its_peers_expect(on_null: OnNull) -> None:
    [problem] = swept(on_null, SCENARIOS["plain"], "nccl", SAMPLED, 1, without_drains).problems
    assert re.fullmatch(
        r"deadlock: rank 0 waits in call \d+ of rank 0 and rank 1: all_gather of \d+ float32 at "
        r"\S+ledger\.py:\d+; "
        r"rank 1 waits in call \d+ of rank 0 and rank 1: .*",
        problem,
    )


def exchange() -> None:
    """Collective: check the results of small collectives, as on GPUs."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    objects = [None] * ranks
    dist.all_gather_object(objects, "x" * 10 * rank)
    assert objects == ["x" * 10 * each for each in range(ranks)]
    sent = [{"a": 5}, [rank]] if rank == 0 else [None, None]
    dist.broadcast_object_list(sent, 0)
    assert sent == [{"a": 5}, [0]]
    numbers = torch.tensor([rank + 1] * ranks).to(device())
    for operation, expected in ((dist.ReduceOp.SUM, 6), (dist.ReduceOp.MAX, 3), (dist.ReduceOp.MIN, 1)):
        dist.all_reduce(reduced := numbers.clone(), operation)
        assert reduced.tolist() == [expected] * ranks
    dist.all_reduce(mean := torch.tensor([float(rank)]).to(device()), dist.ReduceOp.AVG)
    assert mean.item() == 1
    dist.reduce_scatter_tensor(total := torch.tensor([0]).to(device()), numbers)
    assert total.item() == 6
    received = torch.zeros_like(numbers)
    dist.all_to_all_single(received, numbers)
    assert received.tolist() == [1, 2, 3]
    pairs = [
        dist.P2POp(dist.isend, numbers[:1], (rank + 1) % ranks),
        dist.P2POp(dist.irecv, received[:1], (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    assert received[0].item() == (rank - 1) % ranks + 1
    if (pair := dist.new_group([0, 2])) != dist.GroupMember.NON_GROUP_MEMBER:
        dist.broadcast(both := torch.tensor([rank]).to(device()), 2, group=pair)
        assert both.item() == 2
    model = DistributedDataParallel(nn.Linear(4, 4).to(device()))  # compares the sizes of parameters
    model(torch.ones(2, 4, device=device())).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_tensors_and_objects_reach_the_other_ranks(on_null: OnNull, tmp_path: Path, backend: str) -> None:
    on_null(record_on_rank, str(tmp_path), f"cuda:{backend}", exchange, ranks=3, in_group=False)
    report = Replay(tmp_path)
    assert problems_in(report) == []
    assert report.calls > 12


def calls_with_a_full_card() -> None:
    """Collective: issue collectives on a full card. The group counts those that NCCL gets, and only others fail."""
    backend = dist.group.WORLD._get_backend(device())
    elements = 2**21
    [whole, part] = [torch.zeros(size, device=device()) for size in (2 * elements, elements)]
    parts = [*whole.chunk(2)]
    factor = torch.distributed._make_nccl_premul_sum(0.5)
    collectives: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG),
        "reduce_scatter with a factor": lambda: dist.reduce_scatter_tensor(part, whole, factor),
        "all_reduce": lambda: dist.all_reduce(part),
        "all_reduce of masks": lambda: dist.all_reduce(part[:512].bool(), dist.ReduceOp.MAX),
        "broadcast": lambda: dist.broadcast(part, 0),
        "all_to_all": lambda: dist.all_to_all_single(whole[:elements], part),
        "all_gather of a list": lambda: dist.all_gather(parts, part),
        "barrier": dist.barrier,
    }
    of_fsdp = ("all_gather", "reduce_scatter", "reduce_scatter with a factor", "all_reduce")
    for name, issue in collectives.items():
        issue()  # the first use may allocate what later ones keep
        before = backend._get_sequence_number_for_group(), launches()
        kept, failed = everything_left(), False
        try:
            issue()
        except torch.OutOfMemoryError:
            failed = True
        counted, launched = backend._get_sequence_number_for_group() - before[0], launches() - before[1]
        assert (counted == 0) == (launched == 0) == failed, name
        assert name not in of_fsdp or (counted, launched) == (1, 1)
        del kept
        set_memory(80 * 2**30, device=dist.get_rank())


def launches() -> int:
    recording = Path(os.environ["NULL_CUDA_RECORD"]) / f"rank{dist.get_rank()}"
    return sum(line.startswith("call") for line in recording.open())


@pytest.mark.parametrize("backend", ["nccl", "nccl-legacy"])
def test_collective_on_a_full_card_is_counted_exactly_if_it_is_launched(
    on_null: OnNull, tmp_path: Path, backend: str
) -> None:
    on_null(record_on_rank, str(tmp_path), f"cuda:{backend}", calls_with_a_full_card, ranks=2, in_group=False)


def copy_and_release() -> None:
    """Collective: copies to pageable memory and releases are recorded as synchronizations."""
    recording = Path(os.environ["NULL_CUDA_RECORD"]) / f"rank{dist.get_rank()}"
    source, pageable = torch.zeros(8, device=device()), torch.zeros(8)
    pinned, unused = torch.zeros(8).pin_memory(), torch.zeros(2**22, device=device())
    del unused
    operations: list[tuple[Callable[[], object], set[str]]] = [
        (lambda: pageable.copy_(source, non_blocking=True), {"stream"}),
        (lambda: pinned.copy_(source, non_blocking=True), set()),
        (torch.cuda.empty_cache, {"device"}),
    ]
    for run, expected in operations:
        before = recording.stat().st_size
        run()
        with recording.open() as lines:
            lines.seek(before)
            assert {line.split("\t")[0] for line in lines} & {"stream", "device"} == expected


def test_copies_to_pageable_memory_and_releases_are_recorded_as_synchronizations(
    on_null: OnNull, tmp_path: Path
) -> None:
    on_null(record_on_rank, str(tmp_path), "cuda:nccl", copy_and_release, ranks=2, in_group=False)


def communicators() -> int:
    """Return the number of communicators of this rank; NCCL may create one at its first use."""
    return (Path(os.environ["NULL_CUDA_RECORD"]) / f"rank{os.environ['RANK']}").read_text().count("creates it")


def take_a_first_step() -> None:
    """Collective: all communicators exist with the runner, of all ranks, of the shards and of the replicas."""
    model = build(ModelConfig(replicas=2))
    torch.cuda.synchronize()
    assert communicators() == 0
    runner = runner_of(model, 2)
    assert communicators() == 3
    runner.run(samples_of(dist.get_rank(), 4), step=0)
    assert communicators() == 3


def test_every_communicator_exists_before_the_first_step(on_null: OnNull, tmp_path: Path) -> None:
    arguments = str(tmp_path), "cuda:nccl-legacy,cpu:gloo", take_a_first_step
    on_null(record_on_rank, *arguments, ranks=4, in_group=False)


def join_as_recipes_do() -> None:
    """Collective."""
    dist.destroy_process_group()
    use_next_port()
    before = communicators()
    dist.Backend.default_device_backend_map["cuda"] = "nccl-legacy"  # which by default creates it at first use
    join_on(device())
    assert communicators() == before + 1


def test_recipes_create_the_communicator_when_they_join(on_null: OnNull, tmp_path: Path) -> None:
    on_null(record_on_rank, str(tmp_path), "cuda:nccl", join_as_recipes_do, ranks=2, in_group=False)
