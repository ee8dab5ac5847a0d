"""Averages the gradients of whole models over the ranks, in buckets, while the backward computes further gradients.

Buckets hold the trained parameters in reverse order, as in DistributedDataParallel, so all ranks have the same buckets.
Every rank reduces them once per attempt, in the same order. It reduces a bucket in the last microbatch, as soon as the
backward has computed its gradients, and the rest of the buckets after this backward. A rank that ran out of memory
sends zeros for the rest. Sizes and order do not depend on samples, so each rank may reduce a bucket at any time.

Reduced gradients are not in `grad` until the attempt is complete. If a reduced parameter has a `grad` again, another
backward of the same microbatch has used it. All ranks then reduce all buckets once more, and add the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain
from operator import or_
from threading import Lock
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtune_adaptive.engine.ranks import Agreement, explaining_failures, world_size

MEAN = "the mean of the gradients"
FIRST_BYTES, MOST_BYTES = 2**20, 25 * 2**20
"""Sizes of the first bucket and of all others, as in DistributedDataParallel. A larger parameter has its own bucket."""


class Bucket:
    """Parameters of one dtype and device, whose gradients are reduced together. Sparse gradients become dense."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.last: nn.Parameter | None = None
        """The parameter whose gradient completes the bucket, once the order is known; None if no gradient does."""
        self._ends = [*accumulate(each.numel() for each in parameters)]
        # gradients keep the strides of parameters, because fused optimizers require it
        like = [torch.empty_strided(each.shape, each.stride(), device="meta") for each in parameters]
        self._strides = [torch.empty_like(each).stride() for each in like]
        self.begin()

    def begin(self) -> None:
        """Begin an attempt."""
        self.is_complete = self.last is None
        self.has_gradient = [False] * len(self.parameters)
        self.reductions: list[list[Tensor]] = []
        """For each reduction of this bucket, the gradients of all parameters."""

    @torch.no_grad()
    def take(self) -> Tensor:
        """Move the gradients of this rank from `grad` into one tensor, and divide it by the number of ranks."""
        gradients = [each.grad for each in self.parameters]
        for each in self.parameters:
            each.grad = None
        self.has_gradient = [has or each is not None for has, each in zip(self.has_gradient, gradients, strict=True)]
        alone = gradients[0] if len(gradients) == 1 else None
        if alone is None or alone.is_sparse or alone.stride() != self._strides[0]:
            return self._copy(gradients)
        self.reductions.append([alone.div_(world_size())])
        return alone

    def _copy(self, gradients: list[Tensor | None]) -> Tensor:
        first = self.parameters[0]
        flat = torch.empty(self._ends[-1], dtype=_dtype_of(first), device=first.device)
        starts = zip(self.parameters, self._strides, [0, *self._ends], strict=False)
        views = [flat.as_strided(each.shape, strides, start) for each, strides, start in starts]
        for view, gradient in zip(views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                torch.div(gradient.to_dense() if gradient.is_sparse else gradient, world_size(), out=view)
        self.reductions.append(views)
        return flat

    def zeros(self) -> Tensor:
        """Return zeros in the size of all gradients."""
        first = self.parameters[0]
        return torch.zeros(self._ends[-1], dtype=_dtype_of(first), device=first.device)


class GradientBuckets:
    """The buckets of a model, and the reductions of the current attempt."""

    def __init__(self, issue: Callable[..., dist.Work | None]) -> None:
        """`issue` counts a collective, issues it and returns its work."""
        self._issue = issue
        self._trained: list[int] = []
        self._buckets: list[Bucket] = []
        self._waiting: list[dist.Work] = []
        self._reduced = 0  # number of reductions in this attempt
        self._order_known: bool | None = None  # True if the `last` of every bucket is set, False if it was wrong
        self._lock = Lock()  # autograd has a thread for each device

    def assign(self, parameters: Iterable[nn.Parameter]) -> None:
        """Assign the trained ones of these parameters to buckets. All ranks must train the same parameters."""
        trained = [each for each in parameters if each.requires_grad]
        if [*map(id, trained)] != self._trained:
            self._trained, self._buckets = [*map(id, trained)], [*_buckets_of(trained)]
            self._order_known = None

    def begin(self) -> None:
        """Begin an attempt."""
        self._reduced = 0
        for bucket in self._buckets:
            bucket.begin()

    @contextmanager
    def reducing(self, *, overlaps: bool) -> Iterator[None]:
        """Collective: reduce the gradients of an attempt, whose last microbatch runs inside this context.

        With `overlaps`, reduce buckets in the backward, each after the gradient that completed it last time. The first
        attempt with `overlaps` only finds these gradients.
        """
        fired: list[Tensor] = []
        hooks = []
        for bucket in self._buckets if overlaps else ():
            if self._order_known is None:
                hooks += [each.register_post_accumulate_grad_hook(fired.append) for each in bucket.parameters]
            elif self._order_known and bucket.last is not None:
                hooks.append(bucket.last.register_post_accumulate_grad_hook(partial(self._complete, bucket)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if overlaps and self._order_known is None:
            self._find_order(fired)
        for bucket in self._buckets[self._reduced :]:
            self._send(bucket.take())
        self._wait()

    def _find_order(self, fired: Sequence[Tensor]) -> None:
        places = {id(each): place for place, each in enumerate(fired)}
        self._order_known = len(places) == len(fired)  # otherwise, several backwards have used a parameter
        for bucket in self._buckets:
            used = [each for each in bucket.parameters if id(each) in places]
            bucket.last = max(used, key=lambda each: places[id(each)], default=None)

    def _complete(self, bucket: Bucket, _: Tensor) -> None:
        """Collective: reduce this bucket and those that were waiting for it."""
        with self._lock:
            bucket.is_complete = True
            while self._reduced < len(self._buckets) and self._buckets[self._reduced].is_complete:
                self._send(self._buckets[self._reduced].take())

    def _send(self, tensor: Tensor) -> None:
        """Collective."""
        work = self._issue(MEAN, partial(dist.all_reduce, tensor), tensor.device.type, async_op=True)
        assert work is not None, "an asynchronous collective returns its work"
        self._waiting.append(work)
        self._reduced += 1

    def _wait(self) -> None:
        """Wait for all reductions; on CUDA, only its stream waits."""
        with explaining_failures(MEAN):
            while self._waiting:
                self._waiting.pop().wait()

    def drain(self) -> None:
        """Collective: send zeros for the buckets that this rank has not reduced in this attempt."""
        for bucket in self._buckets[self._reduced :]:
            self._send(bucket.zeros())
            self._wait()

    def reset(self) -> None:
        """Collective: drop the reductions of an attempt, after they are complete."""
        self._wait()
        for bucket in self._buckets:
            bucket.begin()

    def describe(self) -> tuple[bool, int]:
        """Return True if gradients are left, after which reductions no longer overlap with the backward, and a checksum
        of the parameters that have gradients."""
        left = [each.grad is not None for bucket in self._buckets for each in bucket.parameters]
        if self._reduced and any(left):
            self._order_known = False
        return any(left), crc32(bytes(map(or_, left, self._has_gradient())))

    def _has_gradient(self) -> Iterator[bool]:
        return chain.from_iterable(bucket.has_gradient for bucket in self._buckets)

    def finish(self, agreement: Agreement, *, any_left: bool, same_parameters: bool) -> None:
        """Collective if any rank has gradients that are not reduced, or if they belong to other parameters: put the
        means into `grad`. A gradient that is None counts as zeros. If it is None on all ranks, it stays None."""
        if any_left:
            for bucket in self._buckets:
                self._send(bucket.take())
        self._wait()
        has_gradient = [*self._has_gradient()]
        on_any_rank = iter(has_gradient if same_parameters else agreement.any_rank(has_gradient))
        for bucket in self._buckets:
            means, *added = bucket.reductions or [[*bucket.parameters]]
            for reduction in added:
                for mean, addend in zip(means, reduction, strict=True):
                    mean.add_(addend)
            for parameter, mean in zip(bucket.parameters, means, strict=True):
                if next(on_any_rank):
                    parameter.grad = mean
            bucket.begin()


def _dtype_of(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype of its gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def _buckets_of(parameters: Sequence[nn.Parameter]) -> Iterator[Bucket]:
    """Yield the buckets in the order in which a backward probably completes them."""
    buckets: list[list[nn.Parameter]] = []
    open_buckets: dict[object, list[nn.Parameter]] = {}
    for parameter in reversed(parameters):
        kind = _dtype_of(parameter), parameter.device
        bucket = open_buckets.get(kind, [])
        limit = MOST_BYTES if len(buckets) > 1 else FIRST_BYTES
        if not bucket or sum(each.nbytes for each in [*bucket, parameter]) > limit:
            buckets.append(bucket := [])
        open_buckets[kind] = bucket
        bucket.append(parameter)
    order = {id(parameter): place for place, parameter in enumerate(reversed(parameters))}
    for bucket in sorted(buckets, key=lambda bucket: order[id(bucket[-1])]):
        yield Bucket(bucket)
