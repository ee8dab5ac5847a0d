"""Splits the samples of a step into microbatches, with or without padding, and distributes samples over the ranks."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from torchtune_adaptive.engine.limits import Limit, MicrobatchSize, most_that_fit

Plan: TypeAlias = tuple[tuple[int, ...], ...]
"""For each microbatch of a step, the indices of its samples."""

Sample = TypeVar("Sample")

_HALVINGS = 6
"""Number of bisection steps for the size of equal microbatches. Six find it to 2 % of the largest microbatch."""


@dataclass(frozen=True, kw_only=True)
class SampleKind(Generic[Sample]):
    """Describes the samples of a step to a StepRunner. Samples can be objects of any type."""

    length_of: Callable[[Sample], int]
    """Returns the number of tokens of a sample, for limits by length."""
    filler: Callable[[Sample], Sample]
    """Returns a small sample that passes through the whole model, for example two tokens. A drain runs it for a
    microbatch whose collectives are not recorded. So does a rank with fewer microbatches than its peers, as under a
    limit by tokens; then it must have no labels."""
    row_lengths_of: Callable[[Sample], Sequence[int]] | None = None
    """Returns the number of tokens of each sequence, for samples of several sequences, such as pairs of answers.
    `length_of` must then return the number for the longest sequence. Such a sample is one row of a RowLimit."""
    padded: bool = True
    """True if `forward_backward` pads sequences to the longest one. False if it concatenates them; a limit by length
    then counts the tokens of all samples."""
    cost_of: Callable[[int], float] = float
    """Returns the relative computing cost of a row with this number of tokens, for `StepResult.imbalance`."""

    def lengths(self, samples: Sequence[Sample]) -> list[int]:
        """Return the length of each sample. An empty sample has length 1, because it is padded to one token."""
        return [max(1, operator.index(self.length_of(sample))) for sample in samples]

    def plan(self, lengths: Sequence[int], limit: Limit) -> Plan:
        """Return a plan with as few microbatches as possible. A sample that exceeds the limit gets its own microbatch.

        Under a limit by rows, microbatches have consecutive samples. With `batch_size` rows, these are the batches of
        torchtune's recipes. Under a limit by length, padded microbatches are filled in descending order of length. This
        gives the fewest microbatches, because rows that fit at one length also fit at a shorter one. Without padding,
        each sample is added to the smallest microbatch. This may need a few more microbatches than the minimum.
        """
        if self.padded or not limit.by_length:
            order = _longest_first(lengths) if limit.by_length else tuple(range(len(lengths)))
            return _cut(order, _microbatch_starts(order, lengths, limit.rows_at))
        total = sum(lengths)
        fullest = max(1, most_that_fit(lambda tokens: limit.fits(1, 1, tokens), total))
        microbatches = min(len(lengths), -(-total // fullest))  # the minimum, if all are full
        while True:
            plan = _filled_evenly(lengths, microbatches)
            if microbatches >= len(lengths) or _all_fit(plan, lengths, limit):
                return tuple(rows for rows in plan if rows)
            microbatches = min(len(lengths), microbatches + max(1, microbatches // 64))

    def spread(self, plan: Plan, lengths: Sequence[int], limit: Limit, microbatches: int) -> Plan:
        """Return a plan with the number of microbatches on which the ranks have agreed, at least that of `plan`.

        They have similar sizes, the largest first. Ranks run their microbatches at the same time, so they wait for each
        other if sizes differ. If there are fewer samples than microbatches, the last microbatches are empty.
        """
        if self.padded:
            plan = _equalized(plan, lengths, limit, microbatches)
        elif len(plan) == microbatches:
            return plan
        elif _all_fit(even := _filled_evenly(lengths, microbatches), lengths, limit):
            return even
        return _split_largest(plan, microbatches, lengths, self.padded)

    def sizes(self, plan: Plan, lengths: Sequence[int]) -> list[MicrobatchSize]:
        """Return the size of each microbatch of a plan."""
        return [size_of(rows, lengths, padded=self.padded) for rows in plan]

    def load(self, plan: Plan, lengths: Sequence[int], samples: Sequence[Sample]) -> Load:
        """Return the amount of work in a plan for samples of these lengths."""
        of_samples: Sequence[Sequence[int]] = [(length,) for length in lengths]
        if self.row_lengths_of is not None:
            of_samples = [*map(self.row_lengths_of, samples)]
        rows_per_sample = len(of_samples[0]) if self.padded else 1
        sizes = [size_of(indices, lengths, padded=self.padded) for indices in plan if indices]
        tokens = [rows_per_sample * size.padded_tokens for size in sizes]
        if self.padded:
            costs = [rows_per_sample * size.rows * self.cost_of(size.length) for size in sizes]
        else:
            costs = [self.cost_of(length) for of_sample in of_samples for length in of_sample]
        return Load(sum(map(sum, of_samples)), sum(tokens), max(size.rows for size in sizes), max(tokens), sum(costs))


def _longest_first(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the samples in descending order of length; equal lengths keep their order."""
    return tuple(sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True))


def _microbatch_starts(order: Sequence[int], lengths: Sequence[int], rows_at: Callable[[int], int]) -> list[int]:
    """Return the positions in `order` at which microbatches begin, if each is as large as possible. `rows_at` is called
    with the length of the first sample of a microbatch, the longest, and returns its most rows."""
    starts, start = [], 0
    while start < len(order):
        starts.append(start)
        start += max(1, rows_at(lengths[order[start]]))
    return starts


def _cut(order: tuple[int, ...], starts: Sequence[int]) -> Plan:
    return tuple(order[start:end] for start, end in pairwise([*starts, len(order)]))


def _equalized(plan: Plan, lengths: Sequence[int], limit: Limit, microbatches: int) -> Plan:
    """Return a plan with this number of microbatches or fewer, whose largest microbatch is as small as possible.
    Bisection finds the smallest number of padded tokens per microbatch for which that many microbatches suffice."""
    order = tuple(chain.from_iterable(plan))

    def starts_under(tokens: int) -> list[int]:
        return _microbatch_starts(order, lengths, lambda length: min(limit.rows_at(length), tokens // length))

    too_few_tokens, enough_tokens = 0, max((size_of(rows, lengths).padded_tokens for rows in plan), default=0)
    for _ in range(_HALVINGS):
        tokens = (too_few_tokens + enough_tokens) // 2
        starts = starts_under(tokens)
        if len(starts) > microbatches:
            too_few_tokens = tokens
        else:
            plan, enough_tokens = _cut(order, starts), tokens
    return plan


def _filled_evenly(lengths: Sequence[int], microbatches: int) -> Plan:
    """Assign each sample, longest first, to the smallest microbatch so far. Return the largest microbatch first."""
    parts: list[list[int]] = [[] for _ in range(microbatches)]
    emptiest = [(0, number) for number in range(microbatches)]
    for index in _longest_first(lengths):
        tokens, number = emptiest[0]
        parts[number].append(index)
        heapq.heapreplace(emptiest, (tokens + lengths[index], number))
    by_size = sorted(emptiest, key=lambda part: (-part[0], part[1]))
    return tuple(tuple(parts[number]) for _, number in by_size)


def _all_fit(plan: Plan, lengths: Sequence[int], limit: Limit) -> bool:
    """Return True if each microbatch, without padding, is within the limit or has a single sample."""
    return all(len(rows) <= 1 or limit.fits(*size_of(rows, lengths, padded=False)) for rows in plan)


def _split_largest(plan: Plan, microbatches: int, lengths: Sequence[int], padded: bool) -> Plan:
    """Halve the largest microbatch until there are enough. If all have a single sample, add empty ones."""

    def by_size(rows: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        return -size_of(rows, lengths, padded=padded).padded_tokens, rows

    heap = [by_size(rows) for rows in plan]
    heapq.heapify(heap)
    single: list[tuple[int, tuple[int, ...]]] = []
    while heap and len(heap) + len(single) < microbatches:
        largest = heapq.heappop(heap)
        rows = largest[1]
        if len(rows) == 1:
            single.append(largest)
            continue
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            heapq.heappush(heap, by_size(half))
    parts = sorted(single + heap)  # the largest first on every rank, so that ranks run similar sizes at the same time
    return (*(rows for _, rows in parts), *[()] * (microbatches - len(parts)))


def size_of(rows: Sequence[int], lengths: Sequence[int], *, padded: bool = True) -> MicrobatchSize:
    """Return the size of a microbatch of these samples. An empty one counts as one row, because it runs a filler."""
    row_lengths = [lengths[index] for index in rows] or [1]
    return MicrobatchSize(len(row_lengths), max(row_lengths), None if padded else sum(row_lengths))


class Load(NamedTuple):
    """The amount of work in a plan."""

    tokens: int
    """Tokens without padding."""
    padded_tokens: int
    """Tokens, padding included."""
    most_rows: int
    """Number of rows in the microbatch with the most rows."""
    most_tokens: int
    """Tokens of the largest microbatch, padding included."""
    cost: float
    """Computing cost, padding included."""


def assign_to_ranks(costs: Sequence[float], ranks: int) -> tuple[int, ...]:
    """Return the rank of each sample, so that ranks get equally many samples and similar costs.

    Samples are assigned in descending order of cost, each to the rank with the lowest total so far. The result depends
    only on the costs and their order, so it is the same on all ranks.
    """
    samples_per_rank, left_over = divmod(len(costs), ranks)
    if left_over:
        raise ValueError(f"{len(costs)} samples cannot be divided equally among {ranks} ranks")
    rank_of = [0] * len(costs)
    emptiest = [(0.0, 0, rank) for rank in range(ranks)]  # total cost and number of samples of each rank
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        cost, count, rank = emptiest[0]
        rank_of[index] = rank
        if count + 1 < samples_per_rank:
            heapq.heapreplace(emptiest, (cost + costs[index], count + 1, rank))
        else:
            heapq.heappop(emptiest)
    return tuple(rank_of)
