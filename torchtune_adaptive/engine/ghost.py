"""Ghost passes: repeat a microbatch of a failed rank without data, to issue the collectives that its peers expect.

Under tensor, context and expert parallelism, the sizes of collectives depend on the samples, so the record of an
earlier microbatch does not show which collectives the peers expect. A rank that ran out of memory therefore runs the
failed microbatch again, and all later ones, under FakeTensorMode. Each of these passes is called a ghost pass:

- It skips the collectives that this rank issued before it failed, and issues all later ones. FSDP's all-gathers carry
  this rank's parameters, so peers that gather a layer again get the same weights. Other floats are sent as zeros.
- Floating-point tensors are fake: they have a size, but neither memory nor values. (Small ones that are computed from
  integers alone are real.) Masks that are computed from fake tensors are fake, too.
- Integers (token ids, tokens per expert) are real, because they determine sizes. If an operation computes integers from
  fake tensors, they are made up; for example, a router's choices are spread evenly.
- Collectives of integers send the integers of the ghost pass. If skipped, they return the results of the failed pass.

This works only if collectives, except for the sizes of all-to-alls, do not depend on computed values. So a dry run
precedes the first ghost pass. If it uses made-up values, a second one uses others, and their collectives are compared.
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from torchtune_adaptive.dependencies import refuse_torch
from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.messages import COMMUNICATING, caller, communicates, messages, place_of
from torchtune_adaptive.engine.oom import is_oom
from torchtune_adaptive.engine.ranks import explaining_failures, group_of, rank
from torchtune_adaptive.engine.tensors import wraps_tensors
from torchtune_adaptive.errors import AdaptiveError, RecoveryUnsupportedError, Remedy, UnrecoverableError

if TYPE_CHECKING:
    from torch._ops import OpOverload

try:
    from torch._C import _get_dispatch_mode as get_dispatch_mode
    from torch._C import _TorchDispatchModeKey as DispatchModeKey
    from torch._C._distributed_c10d import Backend, FakeWork
    from torch._ops import OpOverloadPacket
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
        is_fake,
        maybe_get_fake_mode,
        unset_fake_temporarily,
    )
    from torch.distributed.tensor._ops._mask_buffer import MaskBuffer
except ImportError as error:
    refuse_torch(str(error))

__all__ = ["GhostMode", "MaskBuffer", "is_fake", "refusal"]

FUNCTIONAL = ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "broadcast", "reduce_scatter_tensor")
METHODS = (
    "_allgather_base", "_reduce_scatter_base", "allgather", "allreduce", "alltoall", "alltoall_base", "broadcast",
)  # fmt: skip
"""Methods of a process group that communicate."""
RENAMED = {"all_gather_single", "all_to_all_single", "reduce_scatter_single"} & {*vars(dist.ProcessGroup)}
"""Methods that torch.distributed calls since torch 2.15. They dispatch the same operations as those in `METHODS`."""
_SUPPORTED = {*FUNCTIONAL, *(f"{name}_" for name in METHODS), "all_reduce_", "barrier", "shard_dim_alltoall"}
"""Collectives that a process group counts as one message."""
_OF_ANY_SIZE = {"all_to_all_single", "alltoall_", "alltoall_base_"}
"""Collectives whose sizes may depend on computed values, so that they may differ between two dry runs."""
_OVERWRITING = {"allreduce_", "all_reduce_", "broadcast_"}
"""Collectives that overwrite their input."""
_CHOICES = {"argmax", "argmin", "argsort", "kthvalue", "max", "min", "multinomial", "sort", "topk"}
"""Operations that return indices into a dimension of the input."""
_INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"}
_FILLING = {"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}
"""Operations whose results depend on the shape of their input, but not on its values."""
_SMALL = 2**16
"""Floating-point tensors that depend only on integers are real if they have at most this many elements."""
_LARGE = 1000
"""A number that a dry run reads from fake tensors; the other dry run reads 0."""
_KNOWN = "_torchtune_adaptive_known"
"""Attribute of floating-point tensors whose values a ghost pass has."""
_MAX_READS = 10_000
"""Maximum number of values that a pass may read from fake tensors. It ends loops that run until convergence."""
_TOUCHED: dict[Any, str] = {
    nn.Module: "_compiled_call_impl",
    MaskBuffer: "data materialize_mask refcount",
    FakeTensorMode: "allow_non_fake_inputs",
    OpOverloadPacket: "_op",
    torch._ops.OpOverload: "_opname _schema namespace",
    dist.ProcessGroup: " ".join((*METHODS, "unbox", "_get_backend", "_device_types")),
    Backend: "_get_sequence_number_for_group",
    type(dist.distributed_c10d._world): "pg_map pg_names",
    FakeWork: "boxed",
    DispatchModeKey: "FAKE",
}

if missing := fsdp.missing_names(_TOUCHED):
    refuse_torch(f"ghost passes lack {', '.join(missing)}")


class Exchange(NamedTuple):
    """A collective of integers that this rank has issued."""

    tensors: list[Tensor]
    """The tensors among its arguments."""
    result: Any
    """What the call returned, for `_wait`: tensors, or a work object if the collective writes into its arguments."""


class SeenCollective(NamedTuple):
    """A collective that a ghost pass has reached, for comparing two dry runs."""

    name: str
    group: str
    sizes: tuple[torch.Size, ...] | None
    """None for the collectives in `_OF_ANY_SIZE`."""
    where: str

    def __str__(self) -> str:
        sizes = "" if self.sizes is None else f" of {' and '.join(str([*size]) for size in self.sizes)}"
        return f"{self.name}{sizes}{self.where}"


class _Call(NamedTuple):
    """A call of an operation of torch."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return getattr(self.func, "_opname", "")

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in tree_iter((self.args, self.kwargs)) if isinstance(each, Tensor)]

    @property
    def in_place(self) -> bool:
        return self.func.namespace == "c10d"

    @property
    def mutates(self) -> bool:
        return isinstance(self.func, torch._ops.OpOverload) and self.func._schema.is_mutable

    @property
    def written(self) -> list[Tensor]:
        """The tensors that the operation writes into."""
        if not self.mutates:
            return []
        given = dict(zip((each.name for each in self.func._schema.arguments), self.args, strict=False)) | self.kwargs
        written = [given.get(each.name) for each in self.func._schema.arguments if each.is_write]
        return [each for each in tree_iter(written) if isinstance(each, Tensor)]

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def asynchronous(self) -> _Call:
        """Return the call as an asynchronous one. `ProcessGroupNCCL` returns no work for a synchronous one, and waiting
        for it would be a segmentation fault."""
        names = [each.name for each in self.func._schema.arguments]  # before torch 2.15, asyncOp
        flags = [name in ("async_op", "asyncOp") for name in names]
        return self._replace(args=tuple(flag or each for flag, each in zip(flags, self.args, strict=False)))

    def run_for_real(self) -> Any:
        with unset_fake_temporarily():
            return self.run()


class GhostMode(TorchDispatchMode):
    """Dispatch mode that runs ghost passes. Compiled code runs eagerly in it."""

    supports_higher_order_operators = True

    def __init__(self, log: list[Exchange], made_up: int) -> None:
        """`made_up` is 0 or 1. A model that reads a fake mask gets this value. A model that reads a fake number gets
        `_LARGE` times this value. See also `_make_up`."""
        super().__init__()
        self.seen: list[SeenCollective] = []
        self.used_unknown_values = False
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._log, self._made_up, self._reads = log, made_up, 0
        self._issued: Counter[str] | None = None
        self._passed, self._exchanged = Counter[str](), 0
        self._sent: dict[tuple[int, int], list[Tensor]] = {}
        self._place = (0, 0)  # the last module whose forward began, and the number of exchanges since then
        self._gathered: fsdp.FSDPParamGroup | None = None

    def run(self, run: Callable[[], object], issued: Counter[str] | None = None) -> None:
        """Collective: run a pass, but skip the first `issued` collectives of each group, or all if it is None."""
        self._issued, self._passed, self._exchanged, self._place = issued, Counter(), 0, (0, 0)
        self._sent.clear()
        hook = register_module_forward_pre_hook(self._enter)
        try:
            with torch.compiler.set_stance("force_eager"), self._fakes, self:
                run()
        except Exception as error:
            if is_oom(error) or isinstance(error, AdaptiveError):
                raise
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            summary = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            raise refusal(f"it fails without data{place_of(frames[-1])} ({summary})") from error
        finally:
            hook.remove()

    def unshard(self, group: fsdp.FSDPParamGroup, unshard: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Collective, unless skipped: run FSDP's `unshard` of a group, which gathers its parameters."""
        self._gathered = group
        try:
            unshard(*args, **kwargs)
        finally:
            self._gathered = None

    def check_leaks(self) -> None:
        """Raise an error if the pass has stored a fake tensor, because later passes would compute with it."""
        self._fakes.allow_non_fake_inputs = False
        gc.collect()
        tensors = (
            each for each in gc.get_objects() if issubclass(type(each), Tensor) and not wraps_tensors(type(each))
        )
        kept = [each for each in tensors if maybe_get_fake_mode(each) is self._fakes]
        if kept:
            raise refusal(
                f"the model or `forward_backward` keeps a tensor of {[*kept[0].shape]} outside of the modules"
            )

    def _enter(self, module: nn.Module, inputs: object) -> None:
        self._place = (id(module), 0)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(wraps_tensors(kind) for kind in types):  # DTensor and similar types dispatch their inner operations
            return NotImplemented
        call = _Call(func, args, kwargs or {})
        if get_dispatch_mode(DispatchModeKey.FAKE) is not self._fakes:  # DTensor infers shapes in another fake mode
            return call.run()
        if communicates(func):
            return self._communicate(call)
        if getattr(func, "namespace", "") not in COMMUNICATING:
            return self._compute(call)
        return args[0] if is_fake(args[0]) else call.run_for_real()

    def _communicate(self, call: _Call) -> Any:
        """Collective, unless skipped: issue an operation that communicates."""
        call = self._with_real_masks(call)
        tensors, full_name, where = call.tensors, f"{call.func.namespace}::{call.name}", caller()
        group = group_of((*call.args, *call.kwargs.values()))
        if call.name not in _SUPPORTED or group is None:
            raise refusal(f"{full_name}{where} cannot be issued without data")
        if group.size() > 1 and group.group_name not in messages():
            raise refusal(f"{full_name}{where} uses the backend {dist.get_backend(group)}, which counts no messages")
        sizes = None if call.name in _OF_ANY_SIZE else tuple(each.shape for each in tensors)
        self.seen.append(SeenCollective(full_name, group.group_name, sizes, where))
        self._passed[group.group_name] += 1
        skips = self._issued is None or self._passed[group.group_name] <= self._issued[group.group_name]
        carries_integers = any(_is_known(each) and not is_float(each) for each in tensors)
        if carries_integers and call.name != "barrier":  # the tensor of a barrier has no meaning
            result = self._exchange(call, group, skips=skips)
        else:
            if not skips:
                with unset_fake_temporarily():
                    args, kwargs = tree_map(_zeros, (call.args, call.kwargs))
                    if self._gathered is not None and call.name == "_allgather_base_":
                        fsdp.copy_shards(self._gathered, args[1])
                self._issue(_Call(call.func, args, kwargs), group)
            _mark(tensors, known=False)  # a collective in place overwrites them
            result = None if call.in_place else call.run()
        if not call.in_place:
            return result
        work = FakeWork().boxed()
        return (call.args[0], work) if len(call.func._schema.returns) == 2 else work

    def _with_real_masks(self, call: _Call) -> _Call:
        """Replace fake masks, which have no values, by real zeros, because collectives send the values of masks."""
        if not any(is_fake(each) and not is_float(each) for each in call.tensors):
            return call
        self.used_unknown_values = True
        with unset_fake_temporarily():
            args, kwargs = tree_map(
                lambda each: _zeros(each) if is_fake(each) and not is_float(each) else each,
                (call.args, call.kwargs),
            )
        return _Call(call.func, args, kwargs)

    def _issue(self, call: _Call, group: dist.ProcessGroup, integers: list[Tensor] | None = None) -> Any:
        """Collective: issue an operation with real tensors, and wait for it."""
        before = messages()[group.group_name]
        with explaining_failures("a collective of a repeated pass"), unset_fake_temporarily():
            result = call.asynchronous().run()
            if integers is not None:  # before the wait: if it runs out of memory, the next try needs these integers
                self._log.append(Exchange(integers, result))
            _wait(result)
            if integers is not None and call.in_place:  # drop gloo's work: it holds references to fake tensors
                self._log[-1] = Exchange(integers, None)
        if (counted := messages()[group.group_name] - before) > 1:
            raise UnrecoverableError(
                f"{call.name} counts as {counted} messages on rank {rank()} instead of 1, so positions are unknown"
            )
        return result

    def _exchange(self, call: _Call, group: dist.ProcessGroup, *, skips: bool) -> Any:
        """Collective unless `skips`: exchange integers between the ranks, because they determine sizes."""
        if self._issued is None:
            return self._receive_own(call)
        logged = self._logged(call) if skips else None
        self._exchanged += 1
        with unset_fake_temporarily():
            if logged is not None:
                _wait(logged.result)
            self._restore_sent(call, logged)
            if logged is not None:
                return None if call.in_place else tree_map(torch.clone, logged.result)
        return self._issue(call, group, call.tensors)

    def _receive_own(self, call: _Call) -> Any:
        """Return the values that this rank would receive if its peers sent the same as it does, for a dry run."""
        *outputs, sent = call.tensors
        if call.name == "alltoall_":
            outputs = call.args[0]
        received = outputs if call.in_place else call.run()
        with unset_fake_temporarily():
            if not call.in_place:
                return tree_map(lambda each: _repeated(sent, each.shape), received)
            for each in received:
                each.copy_(_repeated(sent, each.shape))
            return None

    def _logged(self, call: _Call) -> Exchange:
        """Return the logged exchange of the failed pass that corresponds to this call."""
        logged = self._log[self._exchanged] if self._exchanged < len(self._log) else None
        if logged is None or [each.shape for each in logged.tensors] != [each.shape for each in call.tensors]:
            raise refusal(f"{call.func.namespace}::{call.name}{caller()}: the failed pass sent other integers here")
        return logged

    def _restore_sent(self, call: _Call, logged: Exchange | None) -> None:
        """Replace integers by those that this rank has sent for this collective before: in the failed pass or, if a
        forward is recomputed, in the original forward."""
        before = logged.tensors if logged else self._sent.get(self._place, call.tensors)
        for mine, sent in zip(call.tensors, before, strict=True):
            mine.copy_(sent)
        if call.name not in _OVERWRITING:
            self._sent.setdefault(self._place, [each.clone() for each in call.tensors])
        self._place = (self._place[0], self._place[1] + 1)

    def _compute(self, call: _Call) -> Any:
        """Run an operation that does not communicate. Values that a ghost pass does not have are fake or made up."""
        if call.name == "lift_fresh" or (all(map(_is_known, call.tensors)) and _is_small(call)):
            return self._compute_values(call)
        call = _with_known_size(call)
        try:
            result = call.run()
        except DataDependentOutputException:
            return self._read(call)
        except DynamicOutputShapeException:
            raise refusal(f"the output size of {call.func}{caller()} depends on computed values") from None
        if overwritten := [each for each in call.written if _is_known(each)]:
            self.used_unknown_values = self.used_unknown_values or not all(map(is_float, overwritten))
            _mark(overwritten, known=False)
            return overwritten[0] if isinstance(result, Tensor) else result
        if call.name in _FILLING and not is_float(result):  # such as the mask from which tokens per expert are counted
            with unset_fake_temporarily():
                shape_only = torch.empty(call.args[0].shape, dtype=call.args[0].dtype, device="meta")
                return call.func(shape_only, *call.args[1:], **{**call.kwargs, "device": result.device})
        return tree_map(partial(self._make_up, call), result)

    def _compute_values(self, call: _Call) -> Any:
        """Run an operation whose result depends only on known values; the values of random floats are made up."""
        is_random = torch.Tag.nondeterministic_seeded in call.func.tags
        self.used_unknown_values |= is_random
        result = _mark(call.run_for_real(), known=True)
        if "empty" in call.name or (is_random and self._made_up and all(map(is_float, tree_iter(result)))):
            with unset_fake_temporarily():  # random integers are kept, because 0 may be out of their range
                tree_map(torch.zero_, result)
        return result

    def _read(self, call: _Call) -> float:
        """Return a number for a value that the model reads from a fake tensor."""
        self.used_unknown_values, self._reads = True, self._reads + 1
        if self._reads > _MAX_READS:
            raise refusal(f"it reads more than {_MAX_READS:,} computed values{caller()}") from None
        return self._made_up * (_LARGE if is_float(call.args[0]) else 1)

    def _make_up(self, call: _Call, fake: Any) -> Any:
        """Return real integers instead of a fake result. Indices, such as those of `topk`, are spread evenly over the
        dimension or, if `made_up` is 1, equal in all rows. Other integers get the value of `made_up`, 0 or 1. Computed
        masks stay fake, because they can be as large as activations."""
        if not is_fake(fake) or is_float(fake) or fake.dtype == torch.bool:
            return fake
        self.used_unknown_values = True
        source = call.args[0]
        named = dict(zip((each.name for each in call.func._schema.arguments), call.args, strict=False)) | call.kwargs
        dim = named.get("dim", None if call.name in ("argmax", "argmin") else -1) if call.name in _CHOICES else None
        with unset_fake_temporarily():
            if dim is None:
                return torch.full(fake.shape, self._made_up, dtype=fake.dtype, device=fake.device)
            keeps = fake.dim() == source.dim()
            sizes = [*fake.shape]
            rows = [*sizes[:dim], *sizes[dim:][1:], sizes[dim]] if keeps else [*sizes, 1]
            among = rows[-1] if self._made_up else source.shape[dim]
            chosen: Tensor = torch.arange(fake.numel(), dtype=fake.dtype, device=fake.device) % max(1, among)
            return chosen.view(rows).movedim(-1, dim) if keeps else chosen.view(sizes)


def refusal(why: str) -> RecoveryUnsupportedError:
    """Return the error for a microbatch that cannot be repeated as a ghost pass."""
    return RecoveryUnsupportedError(
        f"out of memory on rank {rank()}, whose microbatch cannot be completed for the other ranks: {why}",
        Remedy.SMALLER_LIMIT,
    )


def _wait(result: Any) -> None:
    """Wait for the result of a collective: tensors of a functional collective, or else a work object."""
    for each in tree_iter(result):
        if isinstance(each, Tensor):
            torch.ops._c10d_functional.wait_tensor(each)
        elif hasattr(each, "wait"):
            each.wait()


def _zeros(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device) if isinstance(value, Tensor) else value


def _repeated(source: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor of this shape with the values of `source`, repeated as needed."""
    times = -(-shape.numel() // max(1, source.numel()))
    return source.flatten().repeat(times)[: shape.numel()].view(shape)


def is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_known(value: object) -> bool:
    """Return True if a ghost pass has the values: integers, and small tensors that depend only on integers."""
    if not isinstance(value, Tensor) or is_fake(value):
        return False
    return not is_float(value) or getattr(value, _KNOWN, False)


def _is_small(call: _Call) -> bool:
    """Return True if an operation on known tensors returns integers or small tensors, or writes into its arguments."""
    if call.mutates:  # not run here, because it would write twice; its known arguments are small or integers
        return True
    try:
        shapes = call.run()
    except (DataDependentOutputException, DynamicOutputShapeException):
        return True
    return all(each.numel() <= _SMALL or not is_float(each) for each in tree_iter(shapes) if isinstance(each, Tensor))


def _mark(result: Any, *, known: bool) -> Any:
    for each in tree_iter(result):
        if isinstance(each, Tensor) and is_float(each):
            setattr(each, _KNOWN, known)
    return result


def _with_known_size(call: _Call) -> _Call:
    """Replace known masks by indices, so that the result has a known size."""
    if call.name in _INDEXING:
        return call._replace(args=(call.args[0], _without_masks(call.args[1]), *call.args[2:]))
    if call.name == "masked_select" and _is_known(call.args[1]):
        tensor, mask = call.args
        return _Call(torch.ops.aten.index.Tensor, (tensor.expand_as(mask), _without_masks([mask])), {})
    return call


def _without_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for each in indices:
        if each is not None and each.dtype in (torch.bool, torch.uint8) and _is_known(each):
            found += _Call(torch.ops.aten.nonzero.default, (each,), {}).run_for_real().unbind(1)
        else:
            found.append(each)
    return found
