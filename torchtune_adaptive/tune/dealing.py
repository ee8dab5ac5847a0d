"""`adaptive.deal`: distribute the samples of a step over the ranks by cost, so ranks finish at the same time.

    read, weigh    this rank reads its share of a step                -> exchange sizes, during step s
    deal, send     all ranks compute the same distribution            -> exchange samples, during step s + 1
    receive        this rank runs its samples in step s + 2

A step has the same samples as in torchtune. The rank that torchtune would choose reads a sample; another may run it.
The distribution depends on lengths and not on limits, so a repeated step keeps its samples. Positions count trained
samples and not those read ahead.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtune.modules import TransformerDecoder

from torchtune_adaptive.config.components import in_a_line
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.limits import Limit
from torchtune_adaptive.engine.plans import assign_to_ranks
from torchtune_adaptive.engine.ranks import explaining_failures, new_gloo_group, world_size
from torchtune_adaptive.errors import SampleError
from torchtune_adaptive.lifecycle.console import log_rank_0
from torchtune_adaptive.lifecycle.run_state import THIS_RUN
from torchtune_adaptive.rehearsal_flag import REHEARSAL
from torchtune_adaptive.tune.checked_dataset import CheckedDataset, name_of
from torchtune_adaptive.tune.data import Data
from torchtune_adaptive.tune.samples import INDEX, Cost, Sample, TokenKind, cost_of

READ_AHEAD = 2
"""Steps whose samples are in transit between ranks."""


def dealer_of(model: nn.Module, settings: Settings, data: Data, limit: Limit | None) -> Dealer | FullestRank | None:
    """Collective: build the dealer; None if every rank trains on the samples it reads."""
    if limit is None or not limit.by_length:
        return None
    dealt = settings.adaptive.deal and world_size() > 1
    if dealt and (obstacle := obstacle_to_dealing(model, settings)):
        log_rank_0(f"token budget · samples stay on the ranks that read them: {obstacle}")
        dealt = False
    if REHEARSAL.on:
        alike = world_size() == 1 or settings.shuffle  # after shuffling, the samples of other ranks are unknown
        return None if alike else FullestRank(data.dataset, cost_of(model) if dealt else None)
    return Dealer(data.kind, cost_of(model), THIS_RUN.stop_requested) if dealt else None


def obstacle_to_dealing(model: nn.Module, settings: Settings) -> str | None:
    """Return why samples cannot move between ranks."""
    if (ranks := settings.tensor_parallel_dim) > 1:
        return f"tensor_parallel_dim is {ranks}, and ranks that share a model share samples"
    if not isinstance(model, TransformerDecoder):
        return "the model takes more than text, and images are too large to exchange"
    return None


class _Weighed(NamedTuple):
    packets: list[bytes]
    sizes: Tensor
    """[ranks, samples + 1, 2 or more]: bytes and tokens of each sample; the last row is 1 to end the run."""
    arrival: dist.Work


class _Travelling(NamedTuple):
    received: Tensor
    """Bytes of this rank's samples, in the order of the ranks that read them."""
    packet_bytes: list[int]
    arrival: dist.Work
    sent: Tensor
    """The send buffer, kept alive until the exchange completes."""


class Dealer:
    """Distributes the samples of steps through a separate gloo group, so collectives do not mix with training's."""

    def __init__(self, kind: TokenKind, cost: Cost, stop_requested: Callable[[], bool] = bool) -> None:
        """Collective: create a gloo group. `stop_requested` returns True to end the run."""
        self._kind = kind
        self._cost = cost
        self._stop_requested = stop_requested
        self._stopping = False  # agreed by all ranks
        self._group = new_gloo_group()
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()

    def deal(self, steps: Iterable[list[Sample]]) -> Iterator[list[Sample]]:
        """Collective: yield the steps with samples redistributed, an equal number on every rank."""
        weighed: _Weighed | None = None
        sent: _Travelling | None = None
        reading, ended = iter(steps), 0
        while ended < READ_AHEAD:  # until the last step has arrived
            # When a rank asks to end the run, stop reading; train the samples in transit first.
            samples = None if self._stopping else next(reading, None)
            ended += samples is None
            ready, sent = sent, None if weighed is None else self._send(weighed)
            weighed = None if samples is None or self._stopping else self._weigh(samples)
            if ready is not None:
                yield self._receive(ready)

    def _weigh(self, samples: Sequence[Sample]) -> _Weighed:
        """Collective: begin to exchange the sizes of this rank's samples."""
        packets = []
        for sample in samples:
            try:
                packets.append(pickle.dumps(sample, pickle.HIGHEST_PROTOCOL))
            except Exception as error:
                raise SampleError(
                    f"{name_of(sample)} cannot be sent to another rank ({in_a_line(error)}): remove the fields that "
                    "cannot be pickled, or set adaptive.deal: False"
                ) from error
        sizes = torch.zeros(self._ranks, len(samples) + 1, 1 + self._kind.rows, dtype=torch.int64)
        rows = [(len(packet), *self._kind.lengths_of(each)) for packet, each in zip(packets, samples, strict=True)]
        sizes[self._rank, :-1] = torch.tensor(rows, dtype=torch.int64)
        sizes[self._rank, -1, 0] = self._stop_requested()
        with explaining_failures("the exchange of sample lengths"):
            return _Weighed(packets, sizes, dist.all_reduce(sizes, group=self._group, async_op=True))

    def _send(self, step: _Weighed) -> _Travelling:
        """Collective: compute the distribution and begin to exchange samples."""
        with explaining_failures("the exchange of sample lengths"):
            step.arrival.wait()
        self._stopping |= bool(step.sizes[:, -1, 0].any())
        sizes, *lengths = (column.tolist() for column in step.sizes[:, :-1].flatten(0, 1).unbind(1))
        rank_of = assign_to_ranks([sum(map(self._cost, each)) for each in zip(*lengths, strict=True)], self._ranks)
        count, mine = len(step.packets), [at for at, rank in enumerate(rank_of) if rank == self._rank]
        own = [*enumerate(rank_of[self._rank * count : (self._rank + 1) * count])]
        outgoing = [b"".join(step.packets[at] for at, rank in own if rank == to) for to in range(self._ranks)]
        incoming = [sum(sizes[at] for at in mine if at // count == source) for source in range(self._ranks)]
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        sent = torch.frombuffer(bytearray(b"".join(outgoing)), dtype=torch.uint8)
        with explaining_failures("the exchange of samples"):
            arrival = dist.all_to_all_single(
                received, sent, incoming, [*map(len, outgoing)], group=self._group, async_op=True
            )
            assert arrival is not None, "an asynchronous collective returns its work"
        return _Travelling(received, [sizes[at] for at in mine], arrival, sent)

    def _receive(self, step: _Travelling) -> list[Sample]:
        """Collective: return the samples of this rank, in the order of the epoch."""
        with explaining_failures("the exchange of samples"):
            step.arrival.wait()
        content = step.received.numpy().tobytes()
        bounds = pairwise([0, *accumulate(step.packet_bytes)])
        return [pickle.loads(content[start:end]) for start, end in bounds]


class FullestRank:
    """For rehearsals, which run one rank: yields the share of the rank with the longest samples in each step."""

    def __init__(self, dataset: CheckedDataset, cost: Cost | None) -> None:
        """Distribute the samples by the `cost` of their sequences; None: every rank keeps the samples it reads."""
        self._dataset, self._cost = dataset, cost

    def deal(self, steps: Iterable[list[Sample]]) -> Iterator[list[Sample]]:
        """Yield the share with the longest samples of each step."""
        ranks, lengths_of = range(dist.get_world_size()), self._dataset.kind.lengths_of
        for samples in steps:
            own = [sample[INDEX] - dist.get_rank() for sample in samples]
            everybodys = [self._dataset[index + rank] for rank in ranks for index in own]
            rank_of: Sequence[int] = [rank for rank in ranks for _ in own]
            if self._cost is not None:
                rank_of = assign_to_ranks([sum(map(self._cost, lengths_of(each))) for each in everybodys], len(ranks))
            shares = [[each for each, of in zip(everybodys, rank_of, strict=True) if of == rank] for rank in ranks]
            yield max(shares, key=lambda share: sorted((max(lengths_of(each)) for each in share), reverse=True))
