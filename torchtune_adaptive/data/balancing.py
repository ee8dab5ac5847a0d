"""`adaptive.balance`: distribute the samples of a step over the ranks by cost, so ranks finish at the same time.

A step has the same samples as in torchtune, and each rank reads the same samples as in torchtune. Before they are
trained, ranks exchange them in the background, two steps ahead:

    during step s        read the samples of step s + 2, and exchange their sizes
    during step s + 1    compute the distribution, equal on all ranks, and exchange the samples
    in step s + 2        receive and train the samples

The distribution depends on lengths and not on limits, so a repeated step keeps its samples. The position in a
checkpoint counts trained samples, not those read ahead.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtune.modules import TransformerDecoder

from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.data.loading import Data
from torchtune_adaptive.data.samples import Cost, Sample, TokenKind, cost_of
from torchtune_adaptive.engine.limits import Limit
from torchtune_adaptive.engine.plans import assign_to_ranks
from torchtune_adaptive.engine.ranks import explaining_failures, new_gloo_group, world_size
from torchtune_adaptive.lifecycle.console import log_rank_0

READ_AHEAD = 2
"""The number of steps whose samples are in transit between ranks."""


def balancer_of(model: nn.Module, settings: Settings, data: Data, limit: Limit | None) -> Balancer | None:
    """Collective: build the balancer; None if every rank trains on the samples it reads."""
    if limit is None or not limit.by_length or not settings.adaptive.balance or world_size() == 1:
        return None
    if obstacle := obstacle_to_balancing(model, settings):
        log_rank_0(f"token budget · samples stay on the ranks that read them: {obstacle}")
        return None
    return Balancer(data.kind, cost_of(model))


def obstacle_to_balancing(model: nn.Module, settings: Settings) -> str | None:
    """Return the reason why samples cannot be exchanged; None if they can."""
    if (ranks := settings.tensor_parallel_dim) > 1:
        return f"tensor_parallel_dim is {ranks}, and ranks that share a model share samples"
    if not isinstance(model, TransformerDecoder):
        return "the model takes more than text, and images are too large to exchange"
    return None


class Balancer:
    """Distributes samples over a separate gloo group, which keeps its collectives apart from those of training."""

    def __init__(self, kind: TokenKind, cost: Cost) -> None:
        """Collective: create the gloo group."""
        self._kind, self._cost = kind, cost
        self._group = new_gloo_group()
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()

    def balanced(self, steps: Iterable[list[Sample]]) -> Iterator[list[Sample]]:
        """Collective: yield the steps with redistributed samples, the same number on every rank."""
        sized: tuple[list[bytes], Tensor, dist.Work] | None = None
        sent: tuple[Tensor, list[int], dist.Work, Tensor] | None = None
        for samples in chain(steps, [None] * READ_AHEAD):  # until the last step has arrived
            ready, sent = sent, None if sized is None else self._send(*sized)
            sized = None if samples is None else self._send_sizes(samples)
            if ready is not None:
                yield self._receive(*ready)

    def _send_sizes(self, samples: Sequence[Sample]) -> tuple[list[bytes], Tensor, dist.Work]:
        """Collective: begin to exchange the sizes of this rank's samples. Return the pickled samples, bytes and tokens
        of each sample as [ranks, samples, 2 or more], and the exchange that fills them."""
        packets = [pickle.dumps(sample, pickle.HIGHEST_PROTOCOL) for sample in samples]
        sizes = torch.zeros(self._ranks, len(samples), 1 + self._kind.rows, dtype=torch.int64)
        rows = [(len(packet), *self._kind.lengths_of(each)) for packet, each in zip(packets, samples, strict=True)]
        sizes[self._rank] = torch.tensor(rows, dtype=torch.int64)
        with explaining_failures("the exchange of sample lengths"):
            return packets, sizes, dist.all_reduce(sizes, group=self._group, async_op=True)

    def _send(
        self, packets: list[bytes], shared: Tensor, arrival: dist.Work
    ) -> tuple[Tensor, list[int], dist.Work, Tensor]:
        """Collective: compute the distribution and begin to exchange samples. Return the receive buffer, which has the
        samples in the order of the ranks that read them, the bytes of each, the exchange, and the send buffer, which
        must live until the exchange completes."""
        with explaining_failures("the exchange of sample lengths"):
            arrival.wait()
        sizes, *lengths = (column.tolist() for column in shared.flatten(0, 1).unbind(1))
        rank_of = assign_to_ranks([sum(map(self._cost, each)) for each in zip(*lengths, strict=True)], self._ranks)
        count, received_samples = len(packets), [at for at, rank in enumerate(rank_of) if rank == self._rank]
        own = [*enumerate(rank_of[self._rank * count : (self._rank + 1) * count])]
        outgoing = [b"".join(packets[at] for at, rank in own if rank == to) for to in range(self._ranks)]
        incoming = [sum(sizes[at] for at in received_samples if at // count == source) for source in range(self._ranks)]
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        sent = torch.frombuffer(bytearray(b"".join(outgoing)), dtype=torch.uint8)
        with explaining_failures("the exchange of samples"):
            sending = dist.all_to_all_single(
                received, sent, incoming, [*map(len, outgoing)], group=self._group, async_op=True
            )
            assert sending is not None, "an asynchronous collective returns its work"
        return received, [sizes[at] for at in received_samples], sending, sent

    def _receive(self, received: Tensor, packet_bytes: list[int], arrival: dist.Work, _sent: Tensor) -> list[Sample]:
        """Collective: return the samples of this rank, in the order of the epoch."""
        with explaining_failures("the exchange of samples"):
            arrival.wait()
        content, bounds = received.numpy().tobytes(), pairwise([0, *accumulate(packet_bytes)])
        return [pickle.loads(content[start:end]) for start, end in bounds]
