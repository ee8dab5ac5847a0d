"""Compare the passes of adaptive workers with SkyRL's own, without errors and with injected ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.distributed.count_collectives import CountCollectives
from tests.fault_injection import FaultInjector
from tests.skyrl.workers import KINDS, batch, gradients, use_cpus, worker
from torchtune_adaptive.engine.limits import Limit
from torchtune_adaptive.skyrl import adaptive


@dataclass(frozen=True)
class Case:
    kind: str
    method: str = "forward_backward"
    loss_fn: str | None = None
    overrides: tuple[str, ...] = ()
    images: bool = False


KL = ("trainer.algorithm.use_kl_loss=true",)
ENTROPY = (*KL, "trainer.algorithm.use_entropy_loss=true", "trainer.algorithm.entropy_loss_coef=0.1")
TOKENS = ("trainer.max_tokens_per_microbatch=40",)
LORA = tuple(f"trainer.{each}.model.lora.{key}" for each in ("policy", "critic") for key in ("rank=4", "alpha=8"))
KEYS = {
    "rows": ("micro_train_batch_size_per_gpu", "micro_forward_batch_size_per_gpu"),
    "tokens": ("max_tokens_per_microbatch",),
}
CASES = {
    "policy": Case("policy", overrides=KL),
    "policy, cross entropy": Case("policy", loss_fn="cross_entropy"),
    "policy, entropy bonus": Case("policy", overrides=ENTROPY),
    "policy, entropy bonus by tokens": Case("policy", overrides=(*ENTROPY, *TOKENS)),
    "policy, LoRA": Case("policy", overrides=(*KL, *LORA)),
    "policy, by tokens": Case("policy", overrides=(*KL, *TOKENS)),
    "policy, images": Case("policy", overrides=KL, images=True),
    "critic": Case("critic"),
    "critic, 3 of 8 rows": Case("critic", overrides=("trainer.micro_train_batch_size_per_gpu=3",)),
    "critic, LoRA": Case("critic", overrides=LORA),
    "critic, by tokens": Case("critic", overrides=TOKENS),
    "policy forward": Case("policy", "forward"),
    "policy forward, cross entropy": Case("policy", "forward", "cross_entropy"),
    "policy forward, images": Case("policy", "forward", images=True),
    "policy forward, by tokens": Case("policy", "forward", overrides=TOKENS),
    "critic forward": Case("critic", "forward"),
    "reference forward": Case("reference", "forward"),
}


class Ran(NamedTuple):
    """The results of a pass on this rank."""

    gradients: list[Tensor]
    outputs: list[dict[str, list[float]]]
    metrics: dict[str, float]


class Swept(NamedTuple):
    bitwise: bool
    """True if, without errors, gradients, outputs and metrics equal SkyRL's."""
    added_collectives: list[int]
    """Collectives in addition to SkyRL's: with the configured microbatch, and with a smaller one."""
    injected: int
    recovered: int
    difference: float
    """Largest relative difference of gradients and outputs from SkyRL's pass without errors."""
    metrics_bitwise: bool
    """True if the metrics of repeated passes equal those of SkyRL with the smaller microbatch."""


def run(made: Any, case: Case, data: Any = None) -> Ran:
    """Collective: run the pass on a worker, without gradients from before, by default with the batch of this rank."""
    made.model.zero_grad()
    if hasattr(made, "_micro_batches_accumulated"):
        made._micro_batches_accumulated = 0
    arguments = {} if case.loss_fn is None else {"loss_fn": case.loss_fn}
    output = getattr(made, case.method)(batch(images=case.images) if data is None else data, **arguments)
    scale = 1 / (getattr(made, "_micro_batches_accumulated", 0) or 1)  # as in optim_step
    return Ran([each * scale for each in gradients(made)], output.loss_fn_outputs, output.metrics)


def configure(stock: Any, limit: Limit) -> None:
    """Give SkyRL's own worker the limit of a microbatch."""
    for key in KEYS[limit.unit]:
        setattr(stock.cfg, key, limit.size)


def count_collectives(made: Any, case: Case) -> int:
    """Collective: return the number of collectives of a pass on this rank."""
    with CountCollectives() as counted:
        run(made, case)
    return counted.seen.total()


def relative(ours: Iterable[Any], stock: Iterable[Any]) -> float:
    """Return the distance of all numbers, relative to the norm of `stock`."""
    flat = [torch.cat([torch.as_tensor(each).flatten().double() for each in (*all_, 0.0)]) for all_ in (ours, stock)]
    first, second = flat
    return float((first - second).norm() / second.norm().clamp(min=1e-12))


def same(ours: Ran, stock: Ran) -> bool:
    """Return True if all results are bitwise equal."""
    equal = all(map(torch.equal, ours.gradients, stock.gradients)) and len(ours.gradients) == len(stock.gradients)
    return equal and ours.outputs == stock.outputs and same_metrics(ours, stock)


def same_metrics(ours: Ran, stock: Ran) -> bool:
    return {name: ours.metrics.get(name) for name in stock.metrics} == stock.metrics


def pair(case: Case, **arguments: Any) -> tuple[Any, Any]:
    """Collective: return SkyRL's worker and an adaptive one."""
    stock, ours = None, adaptive(KINDS[case.kind], **arguments)
    return tuple(worker(case.kind, base, case.overrides, images=case.images) for base in (stock, ours))


def sweep(name: str, places: int) -> Swept:
    """Collective: run a case without errors, then with an error at each of some places, on the ranks in turn."""
    case, ranks = CASES[name], dist.get_world_size()
    stock, ours = pair(case)
    expected, healthy = run(stock, case), run(ours, case)
    [runner] = ours.passes.runners.values()
    state = runner.state_dict()

    @cache
    def stock_at(limit: Limit) -> Ran:
        configure(stock, limit)
        return run(stock, case)

    with FaultInjector(runner).count(rank=dist.get_rank(), step=ours.passes.calls + 1) as counted:
        run(ours, case)
    counts: list[Any] = [None] * ranks
    dist.all_gather_object(counts, len(counted.operations))
    recovered, difference, metrics_bitwise, added = (
        0,
        0.0,
        True,
        [count_collectives(ours, case) - count_collectives(stock, case)],
    )
    for place in range(places):
        runner.load_state_dict(state)
        before, operation = runner.recoveries, 1 + place * min(counts) // places
        with FaultInjector(runner).fail_at(rank=place % ranks, step=ours.passes.calls + 1, operation=operation):
            ran = run(ours, case)
        recovered += runner.recoveries == before + 1
        difference = max(difference, relative(ran.gradients, expected.gradients))
        difference = max(difference, relative(*(tree_leaves(each.outputs) for each in (ran, expected))))
        # SkyRL's own loss with an entropy bonus depends on the microbatch; of 3 rows, SkyRL's microbatches are no parts
        metrics_bitwise &= "entropy" in name or "3 of 8" in name or same_metrics(ran, stock_at(runner.limit))
    configure(stock, runner.limit)
    added.append(count_collectives(ours, case) - count_collectives(stock, case))
    return Swept(same(healthy, expected), added, places, recovered, difference, metrics_bitwise)


def sweep_all(places: int) -> dict[str, Swept]:
    """Collective: on CPUs."""
    use_cpus()
    return {name: sweep(name, places) for name in CASES}
