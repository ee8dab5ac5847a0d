"""Completes the collectives of a failed rank if ranks exchange activations, by repeating the pass without data.

Under tensor, context and expert parallelism, the sizes of collectives depend on the samples, so the record of an
earlier microbatch does not show which collectives follow. The pass itself does. A rank that ran out of memory therefore
repeats it, forward and backward, under FakeTensorMode. This is the ghost pass:

- It skips the collectives that this rank issued before it failed, and issues all later ones with zeros.
- Floating-point tensors are fake: they have a size, but neither memory nor values.
- Integers are real, because they determine sizes: token ids, masks, tokens per expert. Operations on integers run
  normally. Integers that depend on fake values, such as the experts chosen by a router, are made up such that tokens
  spread evenly. Collectives exchange real integers; those of the failed pass are sent again.

A ghost pass issues what peers expect only if no computed value affects collectives, except the sizes of all-to-alls.
Before the first one, two dry runs with different made-up values are therefore compared.
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._C._distributed_c10d import _resolve_process_group as resolve_process_group
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.listener import COMMUNICATING, SILENT, caller, place_of
from torchtune_adaptive.engine.memory import wraps_tensors
from torchtune_adaptive.engine.oom import is_oom
from torchtune_adaptive.engine.ranks import explaining_failures, message_counters, rank
from torchtune_adaptive.errors import AdaptiveError, RecoveryUnsupportedError, Remedy, UnrecoverableError

if TYPE_CHECKING:
    from torch._ops import OpOverload

_FUNCTIONAL = ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "broadcast", "reduce_scatter_tensor")
_METHODS = ("_allgather_base", "_reduce_scatter_base", "allgather", "allreduce", "alltoall_base", "broadcast")
"""Methods of a process group."""
_SUPPORTED = {*_FUNCTIONAL, *(f"{name}_" for name in _METHODS), "all_reduce_", "barrier", "shard_dim_alltoall"}
"""Collectives that a process group counts as one message."""
_OF_ANY_SIZE = {"all_to_all_single", "alltoall_base_"}
"""Collectives whose sizes may differ between ranks."""
_OVERWRITING = {"allreduce_", "all_reduce_", "broadcast_"}
"""Collectives that overwrite their input."""
_CHOICES = {"argmax", "argmin", "argsort", "kthvalue", "max", "min", "multinomial", "sort", "topk"}
"""Operations that return indices into a dimension of the input."""
_INDEXING = {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_"}
_SMALL = 2**16
"""Maximum elements of a floating-point tensor that is real because it depends only on integers."""
_KNOWN = "_torchtune_adaptive_known"
_MAX_READS = 10_000
"""Values that a pass may read from fake tensors: a loop until convergence would never end."""


class Exchange(NamedTuple):
    """A collective of integers."""

    tensors: list[Tensor]
    """Arguments."""
    result: Any
    """The returned tensors, not waited for; or the returned work, if results are among the arguments."""


class SeenCollective(NamedTuple):
    """A collective in a ghost pass."""

    name: str
    group: str
    sizes: tuple[torch.Size, ...] | None
    """Without a value if ranks may have different sizes."""
    where: str

    def __str__(self) -> str:
        sizes = "" if self.sizes is None else f" of {' and '.join(str([*size]) for size in self.sizes)}"
        return f"{self.name}{sizes}{self.where}"


class GhostPasses:
    """Tracks the microbatches of a step, and issues the remaining collectives after this rank has failed.

    The position in a microbatch comes from the message counters of the process groups. Integers are logged when a
    functional collective or a process group receives them.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = list(models)
        self._log: list[Exchange] = []
        self._begun = Counter[str]()
        self._masks: list[MaskBuffer] = []
        self._checked: set[str] = set()  # stages
        self._in_ghost = self._logs = False
        self._undo = [*self._log_integers(), self._track_masks()]

    def close(self) -> None:
        """Stop logging."""
        while self._undo:
            self._undo.pop()()

    def forget(self, stage: str) -> None:
        """Repeat the check of this stage before its next ghost pass."""
        self._checked.discard(stage)

    def begin_microbatch(self) -> None:
        """Note the position at which a microbatch begins, and log its integers."""
        self._log.clear()
        self._begun, self._logs = messages(), not self._in_ghost

    def end_microbatch(self) -> None:
        """Stop logging until the next microbatch."""
        self._logs = False

    def check(self, run: Callable[[], object], roots: Sequence[fsdp.FSDPModule], stage: str) -> None:
        """Raise if the collectives of a microbatch depend on values that a ghost pass does not have."""
        if stage in self._checked:
            return
        with self.ghost_mode(roots) as first:
            first.run(run)
        if first.used_unknown_values:
            seen = first.seen
            with self.ghost_mode(roots, made_up=1) as second:
                try:
                    second.run(run)
                except RecoveryUnsupportedError as error:
                    if error.__cause__ is None:
                        raise
                    seen = seen[: len(second.seen)]  # the model rejects these values
            for one, other in zip_longest(seen, second.seen):
                if one is None or other is None or one[:3] != other[:3]:
                    alternatives = f"{one or 'nothing'} or {other or 'nothing'}"
                    raise refusal(f"it communicates {alternatives}, depending on computed values")
        self._checked.add(stage)

    @contextmanager
    def ghost_mode(self, roots: Sequence[fsdp.FSDPModule], *, made_up: int = 0) -> Iterator[GhostMode]:
        """Open a mode for ghost passes; restore the attributes of models and FSDP and the gradients at the end."""
        ghost = GhostMode(self._log, made_up)
        attributes = [(each, dict(each)) for model in self._models for each in _attributes_of(model)]
        gradients = [(parameter, parameter.grad) for model in self._models for parameter in model.parameters()]
        self.drop_masks()
        self._in_ghost, self._logs = True, False
        try:
            yield ghost
        finally:
            self._in_ghost = False
            self.drop_masks()
            for root in roots:
                fsdp.reset(root)
            for current, before in attributes:
                current.clear()
                current.update(before)
            for parameter, gradient in gradients:
                parameter.grad = gradient
        ghost.check_leaks()

    def finish(self, ghost: GhostMode, run: Callable[[], object]) -> None:
        """Collective: issue the collectives of the microbatch that this rank has not issued yet."""
        ghost.run(run, messages() - self._begun)

    def drop_masks(self) -> None:
        """Clear the masks of sharded embeddings, which DTensor keeps in the operation even if the pass fails."""
        for mask in self._masks:
            mask.data, mask.refcount = None, 0
        self._masks.clear()

    def _track_masks(self) -> Callable[[], None]:
        materialize = MaskBuffer.materialize_mask

        def tracking(mask: MaskBuffer, data: Tensor) -> None:
            if not any(mask is each for each in self._masks):
                self._masks.append(mask)
            materialize(mask, data)

        setattr(MaskBuffer, "materialize_mask", tracking)  # noqa: B010 - mypy rejects assignments to a method
        return partial(setattr, MaskBuffer, "materialize_mask", materialize)

    def _log_integers(self) -> Iterator[Callable[[], None]]:
        """Log the integers of collectives from now on, at about a microsecond per collective."""

        def log(arguments: Sequence[Any], result: Any) -> None:
            if torch.compiler.is_compiling() or not self._logs or _starts_with_float(arguments):
                return
            tensors = [each for each in tree_iter(arguments) if isinstance(each, Tensor)]
            if not all(map(_is_float, tensors)):
                self._log.append(Exchange(tensors, result))

        wrapped: tuple[tuple[Any, tuple[str, ...], Callable[..., Any]], ...] = (
            (torch.ops._c10d_functional, _FUNCTIONAL, _LoggedPacket),
            (dist.ProcessGroup, _METHODS, _logged_method),
        )
        for owner, names, logged in wrapped:
            for name in names:
                own = getattr(owner, name)
                before = vars(owner)[name]  # getattr() returns an unbound function, which must not be put back
                setattr(owner, name, logged(own, log))
                yield partial(setattr, owner, name, before)


def _logged_method(method: Callable[..., Any], log: Callable[[Sequence[Any], Any], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        log((*args[1:], kwargs), result)
        return result

    return call


class _LoggedPacket:
    """Wraps an operation of torch.ops, and logs calls, except those of overloads."""

    def __init__(self, packet: Any, log: Callable[[Sequence[Any], Any], None]) -> None:
        self._packet, self._log = packet, log

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._packet(*args, **kwargs)
        self._log((*args, kwargs), result)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packet, name)


class GhostMode(TorchDispatchMode):
    """Runs ghost passes. Compiled code runs eagerly."""

    supports_higher_order_operators = True

    def __init__(self, log: list[Exchange], made_up: int) -> None:
        """`made_up` (0 or 1) is the value of whatever a pass reads from a fake tensor. With 1, choices are uneven."""
        super().__init__()
        self.seen: list[SeenCollective] = []
        self.used_unknown_values = False
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._log, self._made_up, self._reads = log, made_up, 0
        self._issued: Counter[str] | None = None
        self._passed, self._exchanged = Counter[str](), 0
        self._sent: dict[tuple[int, int], list[Tensor]] = {}
        self._place = (0, 0)  # the last module whose forward began, and the number of exchanges since

    def run(self, run: Callable[[], object], issued: Counter[str] | None = None) -> None:
        """Collective: run a pass; skip the first `issued` collectives of each group, or all of them if it is None."""
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

    def check_leaks(self) -> None:
        """Raise if the model keeps a fake tensor, because later passes would compute with it."""
        self._fakes.allow_non_fake_inputs = False
        gc.collect()
        kept = [each for each in gc.get_objects() if type(each) is FakeTensor and each.fake_mode is self._fakes]
        if kept:
            raise refusal(f"it keeps a tensor of {[*kept[0].shape]} outside of its modules")

    def _enter(self, module: nn.Module, inputs: object) -> None:
        self._place = (id(module), 0)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(wraps_tensors(kind) for kind in types):  # DTensor and similar types dispatch their inner operations
            return NotImplemented
        kwargs = kwargs or {}
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if mode is not self._fakes:  # a mode in which DTensor computes shapes
            return func(*args, **kwargs)
        if getattr(func, "namespace", "") not in COMMUNICATING:
            return self._compute(func, args, kwargs)
        if func._opname not in SILENT:
            return self._communicate(func, args, kwargs)
        return args[0] if isinstance(args[0], FakeTensor) else _without_fakes(func, args, kwargs)

    def _communicate(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Collective, unless skipped: issue an operation that communicates."""
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        name, group, where = func._opname, _group_of((*args, *kwargs.values())), caller()
        if name not in _SUPPORTED or group is None:
            raise refusal(f"{func.namespace}::{name}{where} cannot be issued without data")
        sizes = None if name in _OF_ANY_SIZE else tuple(each.shape for each in tensors)
        self.seen.append(SeenCollective(f"{func.namespace}::{name}", group.group_name, sizes, where))
        self._passed[group.group_name] += 1
        skips = self._issued is None or self._passed[group.group_name] <= self._issued[group.group_name]
        in_place = func.namespace == "c10d"
        if any(map(_is_known_integer, tensors)):
            result = self._exchange(func, args, kwargs, tensors, group, skips=skips)
        else:
            if not skips:
                zeros = _without_fakes(tree_map, (_zeros, (args, kwargs)), {})
                self._issue(func, zeros[0], zeros[1], group)
            result = None if in_place else func(*args, **kwargs)
        if not in_place:
            return result
        return (args[0], FakeWork().boxed()) if len(func._schema.returns) == 2 else FakeWork().boxed()

    def _issue(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        group: dist.ProcessGroup,
        integers: list[Tensor] | None = None,
    ) -> Any:
        """Collective: issue an operation with real tensors, and wait for it."""
        before = messages()[group.group_name]
        with explaining_failures("a collective of a repeated pass"), unset_fake_temporarily():
            result = func(*args, **kwargs)
            if integers is not None:  # before waiting, which may run out of memory after peers have matched it
                self._log.append(Exchange(integers, result))
            wait(result)
        if (counted := messages()[group.group_name] - before) > 1:
            raise UnrecoverableError(
                f"{func._opname} counts as {counted} messages on rank {rank()} instead of 1, so positions are unknown"
            )
        return result

    def _exchange(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        group: dist.ProcessGroup,
        *,
        skips: bool,
    ) -> Any:
        """Collective, unless skipped: exchange integers, which determine sizes.

        This rank sends the same integers as in the failed pass, or in a forward that is recomputed.
        """
        in_place = func.namespace == "c10d"
        if self._issued is None:  # assume that peers send the same
            *outputs, sent = tensors
            with unset_fake_temporarily():
                for each in outputs if in_place else ():
                    each.copy_(_repeated(sent, each.shape))
            if in_place:
                return None
            shapes = func(*args, **kwargs)
            with unset_fake_temporarily():
                return tree_map(lambda each: _repeated(sent, each.shape), shapes)
        before = self._log[self._exchanged] if self._exchanged < len(self._log) else None
        self._exchanged += 1
        if not skips:
            before = None
        elif before is None or [each.shape for each in before.tensors] != [each.shape for each in tensors]:
            raise refusal(f"{func.namespace}::{func._opname}{caller()} has sent integers that were not logged")
        with unset_fake_temporarily():
            if before is not None:
                wait(before.result)
            sent_before = before.tensors if before else self._sent.get(self._place, tensors)
            for mine, sent in zip(tensors, sent_before, strict=True):
                mine.copy_(sent)
            if func._opname not in _OVERWRITING:
                self._sent.setdefault(self._place, [each.clone() for each in tensors])
            self._place = (self._place[0], self._place[1] + 1)
            if before is not None:
                return None if in_place else tree_map(torch.clone, before.result)
        return self._issue(func, args, kwargs, group, tensors)

    def _compute(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that does not communicate."""
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        name = getattr(func, "_opname", "")
        if name == "lift_fresh" or (all(map(_is_known, tensors)) and _is_small(func, args, kwargs)):
            result = _mark(_without_fakes(func, args, kwargs), known=True)
            return _without_fakes(torch.zero_, (result,), {}) if "empty" in name else result
        if name in _INDEXING:
            args = (args[0], _without_masks(args[1]), *args[2:])
        elif name == "masked_select" and _is_known(args[1]):
            func, args = torch.ops.aten.index.Tensor, (args[0].expand_as(args[1]), _without_masks([args[1]]))
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            self.used_unknown_values, self._reads = True, self._reads + 1
            if self._reads > _MAX_READS:
                raise refusal(f"it reads more than {_MAX_READS:,} computed values{caller()}") from None
            return self._made_up
        except DynamicOutputShapeException:
            raise refusal(f"the output size of {func}{caller()} depends on computed values") from None
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable and _is_known(args[0]):
            self.used_unknown_values = self.used_unknown_values or not _is_float(args[0])
            return _mark(args[0], known=False)
        return tree_map(
            lambda each: self._make_up(func, args, kwargs, each) if _is_fake_integer(each) else each, result
        )

    def _make_up(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], fake: FakeTensor) -> Tensor:
        """Return real integers for a fake result: choices that are even (or maximally uneven), or else zeros."""
        self.used_unknown_values = True
        named = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        name = func._opname
        dim = named.get("dim", None if name in ("argmax", "argmin") else -1) if name in _CHOICES else None
        with unset_fake_temporarily():
            if dim is None:
                return torch.zeros(fake.shape, dtype=fake.dtype, device=fake.device)
            keeps = fake.dim() == args[0].dim()
            sizes = [*fake.shape]
            rows = [*sizes[:dim], *sizes[dim:][1:], sizes[dim]] if keeps else [*sizes, 1]
            among = rows[-1] if self._made_up else args[0].shape[dim]
            chosen: Tensor = torch.arange(fake.numel(), dtype=fake.dtype, device=fake.device) % max(1, among)
            return chosen.view(rows).movedim(-1, dim) if keeps else chosen.view(sizes)


def refusal(why: str) -> RecoveryUnsupportedError:
    """Return the error for a microbatch that cannot be repeated as a ghost pass."""
    return RecoveryUnsupportedError(
        f"out of memory on rank {rank()}, whose microbatch cannot be completed for the other ranks: {why}",
        Remedy.SMALLER_LIMIT,
    )


def messages() -> Counter[str]:
    """Return the number of messages on this rank, by name of the process group."""
    total = Counter[str]()
    for group, counter in message_counters():
        total[group.group_name] += counter()
    return total


def wait(result: Any) -> None:
    """Wait for the result of a collective: tensors if it is functional, otherwise a work object."""
    for each in tree_iter(result):
        if isinstance(each, Tensor):
            torch.ops._c10d_functional.wait_tensor(each)
        elif hasattr(each, "wait"):
            each.wait()


def _attributes_of(model: nn.Module) -> Iterator[dict[str, Any]]:
    for module in model.modules():
        yield from (vars(module), module._buffers, module._parameters)
    yield from map(vars, fsdp.states_of(model))


def _group_of(arguments: Iterable[Any]) -> dist.ProcessGroup | None:
    for each in arguments:
        if isinstance(each, str) and each in dist.distributed_c10d._world.pg_names.values():
            return resolve_process_group(cast(Any, each))
        if isinstance(each, dist.ProcessGroup):
            return each
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.ProcessGroup.unbox(each)
    return None


def _without_fakes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _zeros(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device) if isinstance(value, Tensor) else value


def _repeated(source: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor of this shape with the values of `source`, repeated as needed."""
    times = -(-shape.numel() // max(1, source.numel()))
    return source.flatten().repeat(times)[: shape.numel()].view(shape)


def _starts_with_float(arguments: Any) -> bool:
    """Return True if the first argument is a floating-point tensor: the common case, decided fast."""
    return isinstance(arguments[0], Tensor) and arguments[0].is_floating_point()


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_known(value: object) -> bool:
    """Return True if a ghost pass has the values: integers, and small tensors that depend only on integers."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return False
    return not _is_float(value) or getattr(value, _KNOWN, False)


def _is_known_integer(value: object) -> bool:
    return isinstance(value, Tensor) and not _is_float(value) and not isinstance(value, FakeTensor)


def _is_fake_integer(value: object) -> bool:
    """Return True except for masks, which stay fake: they can be as large as activations."""
    return isinstance(value, FakeTensor) and not _is_float(value) and value.dtype != torch.bool


def _is_small(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an operation on known tensors returns integers or small tensors."""
    try:
        shapes = func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return True
    return all(each.numel() <= _SMALL or not _is_float(each) for each in tree_iter(shapes) if isinstance(each, Tensor))


def _mark(result: Any, *, known: bool) -> Any:
    for each in tree_iter(result):
        if isinstance(each, Tensor) and _is_float(each):
            setattr(each, _KNOWN, known)
    return result


def _without_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replace known masks by indices, so that the result has a known size."""
    found: list[Tensor | None] = []
    for each in indices:
        if each is not None and each.dtype in (torch.bool, torch.uint8) and _is_known(each):
            found += _without_fakes(torch.ops.aten.nonzero.default, (each,), {}).unbind(1)
        else:
            found.append(each)
    return found
