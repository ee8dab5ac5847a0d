"""Compare steps of an AdaptiveTrainer with torchtitan's own, without errors and with injected ones.

python -m tests.titan.sweep [PLACES [CASE ...]]   prints a table of the cases, with an error at each of some places
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

from tests import fault_injection
from tests.distributed.count_collectives import CountCollectives
from tests.fault_injection import FaultInjector
from tests.ranks import RankFailed, RanksHung, run_on_ranks
from tests.titan.trainers import build, config, pair, relative, replace_flex_attention, same, step, use_cpus
from torchtune_adaptive.titan import adaptive


class Case(NamedTuple):
    ranks: int
    model: str
    settings: dict[str, Any]


def meshed(ranks: int, model: str = "llama", backend: str = "spmd_types", **settings: Any) -> Case:
    """Return a case with these degrees of parallelism (`tensor`, `context`, ...) and other settings."""
    degrees = ("tensor", "context", "expert", "data_parallel_replicate", "data_parallel_shard")
    names = {each: f"parallelism__{each}{'' if each.startswith('data') else '_parallel'}_degree" for each in degrees}
    shared = settings.get("tensor", 1) * settings.get("context", 1)  # ranks that share samples
    changed = {names.get(name, name): value for name, value in settings.items()}
    return Case(ranks, model, {"dp": ranks // shared, "parallelism__spmd_backend": backend, **changed})


COMPILED = {"compile__enable": True, "compile__backend": "aot_eager", "compile__components": ["model"]}
CASES = {
    "one rank": meshed(1),
    "FSDP2": meshed(2),
    "FSDP2, 2 batches": meshed(2, batches=2),
    "FSDP2, loss in one piece": meshed(2, chunked=False),
    "FSDP2, tied weights": meshed(2, "qwen"),
    "FSDP2, selective checkpoints": meshed(2, activation_checkpoint=SelectiveAC.Config()),
    "FSDP2, full checkpoints": meshed(2, activation_checkpoint=FullAC.Config()),
    "FSDP2, compiled": meshed(2, **COMPILED),
    "FSDP2, compiled, MemoryBudgetAC": meshed(2, **COMPILED, activation_checkpoint=MemoryBudgetAC.Config()),
    "FSDP2, partial_dtensor": meshed(2, backend="partial_dtensor"),
    "FSDP2, full_dtensor": meshed(2, backend="full_dtensor"),
    "FSDP2, experts": meshed(2, "deepseek"),
    "FSDP2, offloaded to the host": meshed(2, training__enable_cpu_offload=True),
    "replicas": meshed(2, data_parallel_replicate=2, data_parallel_shard=1),
    "HSDP": meshed(4, data_parallel_replicate=2, data_parallel_shard=2),
    "HSDP, 2 batches": meshed(4, data_parallel_replicate=2, data_parallel_shard=2, batches=2),
    "TP": meshed(2, tensor=2),
    "TP, loss in one piece": meshed(2, tensor=2, chunked=False),
    "TP, partial_dtensor": meshed(2, backend="partial_dtensor", tensor=2),
    "TP, full_dtensor": meshed(2, backend="full_dtensor", tensor=2),
    "TP, full checkpoints": meshed(2, tensor=2, activation_checkpoint=FullAC.Config()),
    "TP, selective checkpoints": meshed(2, tensor=2, activation_checkpoint=SelectiveAC.Config()),
    "TP × FSDP2": meshed(4, tensor=2, batches=2),
    "CP": meshed(2, context=2, training__seq_len=256, rows=2, parallelism__context_parallel_load_balancer=None),
    "EP": meshed(2, "deepseek", expert=2),
    "EP, partial_dtensor": meshed(2, "deepseek", "partial_dtensor", expert=2),
    "EP, Qwen3": meshed(2, "qwen moe", expert=2),
    "EP × FSDP2": meshed(4, "deepseek", expert=2),
}


class Swept(NamedTuple):
    bitwise: bool
    """True if gradients without errors equal torchtitan's."""
    added_collectives: int
    injected: int
    recovered: int
    """Steps whose gradients bitwise equal those of a step with the smaller microbatches and without an error."""
    difference: float
    """Largest difference of gradients from torchtitan's with the configured batches, relative to the norm of each."""
    seconds: float


def sweep(name: str, places: int) -> Swept:
    """Collective: run a case without errors, then with an error at each of some places, on the ranks in turn."""
    case, compiles = CASES[name], "compile__enable" in CASES[name].settings
    use_cpus(compiles=compiles)
    if compiles:  # in a dispatch mode, compiled code raises errors: only growths of storages fail
        fault_injection._CountOperations = lambda _: nullcontext()
    stock, ours = pair(case.model, **case.settings)
    expected, healthy, sent = step(stock, 0, update=False), step(ours, 0, update=False), []
    for trainer in (stock, ours):
        counted = CountCollectives()
        with nullcontext() if compiles else counted:
            step(trainer, 0, update=False)
        sent.append(counted.seen.total())
    began, state = time.monotonic(), ours.runner.state_dict()
    ours.runner.load_state_dict({**state, "size": ours.runner.limit.size // 2})
    smaller = step(ours, 0, update=False)
    ours.runner.load_state_dict(state)
    steps = [*with_errors(ours, places)]
    recovered, ran = sum(same(each, smaller) for each in steps), steps[-1]
    difference = max(relative(ran, expected), relative(healthy, expected))
    return Swept(same(healthy, expected), sent[1] - sent[0], places, recovered, difference, time.monotonic() - began)


def with_errors(trainer: Any, places: int) -> Iterator[list[Tensor]]:
    """Collective: yield the gradients of steps with an error at each of some places, on the ranks in turn."""
    state, ranks = trainer.runner.state_dict(), dist.get_world_size()
    with FaultInjector(trainer.runner).count(rank=dist.get_rank(), step=trainer.step + 1) as faults:
        step(trainer, 0, update=False)
    counts: list[Any] = [None] * ranks
    dist.all_gather_object(counts, len(faults.operations))
    for place in range(places):
        trainer.runner.load_state_dict(state)
        operation = 1 + place * (min(counts) - 1) // max(1, places - 1)
        with FaultInjector(trainer.runner).fail_at(rank=place % ranks, step=trainer.step + 1, operation=operation):
            gradients = step(trainer, 0, update=False)
        if trainer.runner.recoveries == state["recoveries"] + 1:
            yield gradients


def recovered_on_null(name: str, places: int) -> int:
    """Collective: run a case on null devices, with an error at each of some places. Return how many it recovered."""
    torch.compiler.set_stance("force_eager")
    replace_flex_attention()
    torch.nn.init._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor  # draws until computed values are in range
    case = CASES[name]
    ours = build(adaptive(config(case.model, **case.settings)))
    step(ours, 0, update=False)
    return len([*with_errors(ours, places)])


def main(places: int, names: list[str]) -> None:
    print("| case | ranks | bitwise | added collectives | errors | recovered | largest difference | s |")
    print("|---|---|---|---|---|---|---|---|")
    totals = [0, 0]
    for name in names or CASES:
        try:
            results = run_on_ranks(CASES[name].ranks, sweep, name, places, timeout_s=120 + 2 * places)
        except (RankFailed, RanksHung) as error:
            print(f"| {name} | {type(error).__name__}: {error}", flush=True)
            continue
        first, worst = results[0], max(each.difference for each in results)
        bitwise, recovered = all(each.bitwise for each in results), min(each.recovered for each in results)
        totals = [totals[0] + first.injected, totals[1] + recovered]
        print(
            f"| {name} | {len(results)} | {bitwise} | {first.added_collectives} | {first.injected} | "
            f"{recovered} | {worst:.0e} | {first.seconds:.0f} |",
            flush=True,
        )
    print(f"{totals[0]:,} injected, {totals[1]:,} recovered")


if __name__ == "__main__":
    main(int(*sys.argv[1:2] or [12]), sys.argv[2:])
