"""Steps of one model, as in finetuning, with out-of-memory errors injected."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.faults.bench import Bench, ForwardBackward, Parts
from tests.distributed.faults.fault_variants import Scenario
from tests.distributed.models import ModelConfig, build, device, forward_backward_of, frozen, samples_of
from torchtune_adaptive.engine import buckets
from torchtune_adaptive.engine.results import Totals


@dataclass(frozen=True)
class Case(Scenario):
    """A training configuration."""

    model: ModelConfig = field(default_factory=ModelConfig)
    samples: int = 4
    error: Callable[[str], Exception] = torch.OutOfMemoryError
    bucket_bytes: int | None = None
    """The size of the buckets of a whole model."""
    with_frozen_model: bool = False
    """Call a frozen model in each microbatch too, so that collectives of two models interleave."""

    def bench(self) -> Bench:
        """Collective: return the bench for this case."""
        samples = samples_of(dist.get_rank(), self.samples)
        return Bench(self, samples, partial(parts_of, self), error=self.error)


JOINED = ModelConfig(joined=True, dropout=0.0)
HYBRID = ModelConfig(replicas=2)
OFFLOADED = ModelConfig(offload=True)
WHOLE, WHOLE_LORA = ModelConfig(sharded=False), ModelConfig(sharded=False, lora=True, checkpointing="full")

CASES = (
    Case("plain"),
    Case("plain, rank 0 fails", failing=(0,), stride=2),
    Case("plain, all ranks fail", failing=(0, 1), stride=3),
    Case("plain, 3 ranks, the last fails", world_size=3, failing=(2,), stride=5),
    Case("plain, 3 ranks, two fail", world_size=3, failing=(0, 2), stride=7),
    Case("fails in the retry too", rows=4, again="retry"),
    Case("fails in the drain too", rows=4, again="drain"),
    Case("first pass", first_pass=True),
    Case("first pass, fails in the drain too", rows=4, first_pass=True, again="drain", stride=3),
    Case("first pass, all ranks fail", failing=(0, 1), first_pass=True, stride=5),
    Case("full checkpointing", ModelConfig(checkpointing="full")),
    Case("selective checkpointing", ModelConfig(checkpointing="selective")),
    Case("compiled layers", ModelConfig(compiled=True), stride=2),
    Case("compiled layers, first pass", ModelConfig(compiled=True), first_pass=True, stride=3),
    Case("no reshard after forward", ModelConfig(reshard_after_forward=False)),
    Case("head in chunks", ModelConfig(head_chunks=4), stride=2),
    Case("head in chunks, first pass", ModelConfig(head_chunks=4), first_pass=True, stride=3),
    Case("head in chunks, fails in the drain too", ModelConfig(head_chunks=4), rows=4, again="drain", stride=5),
    Case(
        "head in chunks, hybrid", ModelConfig(head_chunks=4, replicas=2), world_size=4, rows=4, again="retry", stride=7
    ),
    Case(
        "head in chunks, hybrid, fails in the drain too",
        ModelConfig(head_chunks=4, replicas=2),
        world_size=4,
        rows=4,
        again="drain",
        stride=11,
    ),
    Case("lora", ModelConfig(lora=True)),
    Case("lora, full checkpointing", ModelConfig(lora=True, checkpointing="full"), stride=3),
    Case("bf16", ModelConfig(bf16=True)),
    Case("without padding", JOINED),
    Case("without padding, fails in the drain too", JOINED, rows=4, again="drain"),
    Case("without padding, first pass", JOINED, first_pass=True),
    Case("without padding, full checkpointing", replace(JOINED, checkpointing="full")),
    Case("without padding, lora", replace(JOINED, lora=True)),
    Case("bf16, full checkpointing", ModelConfig(bf16=True, checkpointing="full"), stride=3),
    Case("reduce once", reduce_once=True),
    Case("reduce once, fails in the retry too", rows=4, samples=8, reduce_once=True, again="retry", stride=3),
    Case("reduce once, fails in the drain too", samples=6, reduce_once=True, again="drain", stride=3),
    Case("reduce once, head in chunks", ModelConfig(head_chunks=4), reduce_once=True, stride=3),
    Case("reduce once, bf16, full checkpointing", ModelConfig(bf16=True, checkpointing="full"), reduce_once=True),
    Case("reduce once, lora", ModelConfig(lora=True), reduce_once=True, stride=3),
    Case("reduce once, offloaded", OFFLOADED, reduce_once=True, stride=3),
    Case("with a frozen model", with_frozen_model=True),
    Case("with a frozen model, first pass", with_frozen_model=True, first_pass=True, stride=3),
    Case("with a frozen model, no reshard", ModelConfig(reshard_after_forward=False), with_frozen_model=True, stride=3),
    Case("hybrid", HYBRID, world_size=4),
    Case("hybrid, rank 0 fails", HYBRID, world_size=4, failing=(0,), stride=3),
    Case("hybrid, a rank of each replica fails", HYBRID, world_size=4, failing=(0, 3), stride=3),
    Case("hybrid, both ranks of a replica fail", HYBRID, world_size=4, failing=(2, 3), stride=5),
    Case("hybrid, fails in the retry too", HYBRID, world_size=4, rows=4, again="retry", stride=3),
    Case("hybrid, fails in the drain too", HYBRID, world_size=4, samples=8, rows=4, again="drain", stride=3),
    Case("hybrid, first pass", HYBRID, world_size=4, first_pass=True, stride=3),
    Case(
        "hybrid, first pass, fails in the drain too",
        HYBRID,
        world_size=4,
        failing=(2,),
        rows=4,
        samples=8,
        again="drain",
        first_pass=True,
        stride=5,
    ),
    Case("hybrid, one microbatch", HYBRID, world_size=4, rows=4, stride=5),
    Case("hybrid, no reshard after forward", replace(HYBRID, reshard_after_forward=False), world_size=4, stride=5),
    Case("hybrid, bf16", replace(HYBRID, bf16=True), world_size=4, stride=3),
    Case("hybrid, lora, full checkpointing", replace(HYBRID, lora=True, checkpointing="full"), world_size=4, stride=5),
    Case("hybrid, whole replicas", ModelConfig(replicas=4), world_size=4, stride=5),
    Case("offloaded", OFFLOADED),
    Case("offloaded, fails in the drain too", OFFLOADED, rows=4, again="drain", stride=3),
    Case("offloaded, first pass", OFFLOADED, first_pass=True, stride=3),
    Case("offloaded, full checkpointing", replace(OFFLOADED, checkpointing="full"), stride=5),
    Case("offloaded, bf16", replace(OFFLOADED, bf16=True), stride=5),
    Case("offloaded, hybrid", replace(OFFLOADED, replicas=2), world_size=4, stride=5),
    Case("whole", WHOLE, bucket_bytes=4096),
    Case("whole, both ranks fail", WHOLE, failing=(0, 1), bucket_bytes=4096, stride=7),
    Case("whole, 3 ranks, two fail", WHOLE, world_size=3, failing=(0, 2), stride=7),
    Case("whole, fails in the retry too", WHOLE, rows=4, again="retry", bucket_bytes=4096, stride=7),
    Case("whole, fails in the drain too", WHOLE, rows=4, again="drain", bucket_bytes=4096, stride=7),
    Case("whole, first pass", WHOLE, first_pass=True, stride=5),
    Case("whole, lora, full checkpointing", WHOLE_LORA, bucket_bytes=1024, stride=3),
)


def parts_of(case: Case) -> Parts:
    """Collective: build the models of a case."""
    if case.bucket_bytes is not None:
        buckets.FIRST_BYTES = buckets.MOST_BYTES = case.bucket_bytes
    models = [build(case.model)]
    forward_backward = forward_backward_of(models[0], joined=case.model.joined)
    if case.with_frozen_model:
        models.append(frozen(build(replace(case.model, layers=1))))
        forward_backward = asking(models[1], forward_backward)
    return models, forward_backward


def asking(reference: nn.Module, train: ForwardBackward) -> ForwardBackward:
    """Add the output of the reference to the loss, as a constant."""

    def both(samples: Sequence[Tensor]) -> Totals:
        with torch.no_grad():
            asked = reference(nn.utils.rnn.pad_sequence(list(samples), batch_first=True).to(device())).mean()
        totals = train(samples)
        return totals._replace(loss_sum=totals.loss_sum + asked)

    return both
