"""The protocol for ranks that exchange activations: a failed rank repeats its pass without data (see `ghost.py`).

The message counters of the process groups show how many collectives a rank has issued in a microbatch. In addition, all
functional collectives and methods of process groups are wrapped to log collectives of integers, whose values determine
sizes.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from torchtune_adaptive.engine import fsdp
from torchtune_adaptive.engine.ghost import (
    FUNCTIONAL,
    METHODS,
    RENAMED,
    Exchange,
    GhostMode,
    MaskBuffer,
    SeenCollective,
    is_float,
    refusal,
)
from torchtune_adaptive.engine.ledger import Ledger, Run
from torchtune_adaptive.engine.messages import messages
from torchtune_adaptive.engine.ranks import message_counters
from torchtune_adaptive.errors import RecoveryUnsupportedError

Hook = Callable[[Sequence[Any], Any], object]
_HOOKS: dict[tuple[int, str], tuple[Any, list[Hook]]] = {}
"""Original functions and the hooks that are called after them, by the id of a function's owner and its name. All hooks
of a function share a wrapper, so that they can be removed in any order."""


class GhostLedger(Ledger):
    """Tracks the microbatches of a step, and issues the remaining collectives of a failed rank by ghost passes."""

    uses_ghost_passes: ClassVar[bool] = True

    def __init__(self, *roots: object) -> None:
        super().__init__(*roots)
        self._models = [root for root in roots if isinstance(root, nn.Module)]
        self._log: list[Exchange] = []
        self._before_attempt, self._begun = Counter[str](), Counter[str]()
        self._masks: dict[int, MaskBuffer] = {}  # by id
        self._checked: set[str] = set()  # stages
        self._completed: dict[str, Counter[str]] = {}  # by stage, the messages of its latest microbatch in each group
        self._in_ghost = self._logs = False
        packets = [getattr(torch.ops._c10d_functional, name) for name in FUNCTIONAL]
        self._restore = [
            *(_call_after(packet, "_op", self._log_integers) for packet in packets),
            *(_call_after(dist.ProcessGroup, name, self._log_integers) for name in (*METHODS, *RENAMED)),
            _call_after(MaskBuffer, "materialize_mask", lambda args, _: self._masks.setdefault(id(args[0]), args[0])),
        ]

    @property
    def only_whole_models(self) -> bool:
        """False, because ranks exchange activations."""
        return False

    @property
    def progress(self) -> int:
        """The number of messages of this rank."""
        return messages().total()

    def positions_in_groups(self) -> int:
        """Return this rank's part of `AttemptReport.positions_in_groups`.

        In each group, every rank multiplies its number of messages by a weight, and the weights add up to 0.
        """
        sent, total = messages() - self._before_attempt, 0
        for group, _ in message_counters():
            weights = [zlib.crc32(f"{group.group_name} {each}".encode()) % 2**20 for each in range(group.size() - 1)]
            total += sent[group.group_name] * [*weights, -sum(weights)][group.rank()]
        return total

    def close(self) -> None:
        """Unwrap the collectives."""
        while self._restore:
            self._restore.pop()()
        super().close()

    def begin_attempt(
        self, microbatches: int, models: Sequence[object], stage: str = "", *, reduce_once: bool = False
    ) -> None:
        """Begin an attempt, as in `Ledger`, and read the message counters."""
        self._before_attempt = messages()
        super().begin_attempt(microbatches, models, stage, reduce_once=reduce_once)

    def begin_microbatch(self, number: int) -> None:
        """Begin a microbatch, read the message counters, and start to log its integers."""
        super().begin_microbatch(number)
        self._log.clear()
        self._begun, self._logs = messages(), not self._in_ghost

    def end_microbatch(self) -> None:
        """End a complete microbatch: store how many messages it has, and stop logging until the next one."""
        super().end_microbatch()
        self._completed[self._stage], self._logs = messages() - self._begun, False

    def drain(self, run: Run) -> None:
        """Collective: complete the current microbatch and all later ones by ghost passes."""
        unfinished = partial(run, self._number)
        self.check(unfinished)
        with self.ghost_mode() as ghost:
            self._make_gradients(self._number, partial(ghost.run, unfinished))
            for number in range(self._number, self._microbatches):
                if number > self._number:
                    self.begin_microbatch(number)
                self._set_reductions(self._is_last(number))
                self.finish(ghost, partial(run, number))
                self._end_pass()

    def reset(self) -> None:
        """Reset the models of this stage, and drop the masks of a failed pass."""
        super().reset()
        self.drop_masks()

    def check(self, run: Callable[[], object]) -> None:
        """Raise if the collectives of a microbatch depend on values that a ghost pass does not have. Compares two dry
        runs with different made-up and random values, once per stage. `run` runs the microbatch."""
        if self._stage in self._checked:
            return
        with self.ghost_mode() as first:
            first.run(run)
        self._check_compiled(first.seen)
        if first.used_unknown_values:
            seen = first.seen
            with self.ghost_mode(made_up=1) as second:
                torch.manual_seed(torch.initial_seed() + 1)  # generators are restored before the step is repeated
                try:
                    second.run(run)
                except RecoveryUnsupportedError as error:
                    if error.__cause__ is None:
                        raise
                    seen = seen[: len(second.seen)]  # the model fails with these values: compare what came before
            for one, other in zip_longest(seen, second.seen):
                if one is None or other is None or one[:3] != other[:3]:
                    alternatives = f"{one or 'nothing'} or {other or 'nothing'}"
                    raise refusal(f"it communicates {alternatives}, depending on computed values")
        self._checked.add(self._stage)

    def _check_compiled(self, seen: Sequence[SeenCollective]) -> None:
        """Raise if compiled code, which peers run, may have other collectives than a ghost pass, which runs eagerly."""
        modules = [module for model in self._models for module in model.modules()]
        if not any(each._compiled_call_impl or hasattr(each, "_orig_mod") for each in modules):
            return
        # FSDP all-reduces over replicas in the last microbatch only
        of_replicas = {name for model in self._models for name in fsdp.names_of_replica_groups(model)}
        eager, compiled = Counter(each.group for each in seen), self._completed.get(self._stage, Counter())
        for name in {*eager, *compiled} - of_replicas:
            if eager[name] != compiled[name]:
                times = compiled[name] if self._stage in self._completed else "an unknown number of"
                raise refusal(
                    f"it is compiled, and communicates {eager[name]} times in eager mode, but {times} times in "
                    "compiled code"
                )

    @contextmanager
    def ghost_mode(self, *, made_up: int = 0) -> Iterator[GhostMode]:
        """Yield a mode for ghost passes. At the end, restore gradients and the attributes of models and of FSDP."""
        ghost = GhostMode(self._log, made_up)
        attributes = [(each, dict(each)) for model in self._models for each in _attributes_of(model)]
        gradients = [(parameter, parameter.grad) for model in self._models for parameter in model.parameters()]
        self.drop_masks()
        for group in (each for model in self._models for each in fsdp.groups_of(model)):
            vars(group)["unshard"] = partial(ghost.unshard, group, group.unshard)
        self._in_ghost, self._logs = True, False
        try:
            yield ghost
        finally:
            self._in_ghost = False
            self.drop_masks()
            for root in self._owned:
                fsdp.reset(root)
            for current, before in attributes:
                current.clear()
                current.update(before)
            for parameter, gradient in gradients:
                parameter.grad = gradient
        ghost.check_leaks()

    def finish(self, ghost: GhostMode, run: Callable[[], object]) -> None:
        """Collective: issue those collectives of the microbatch that this rank has not issued yet."""
        ghost.run(run, messages() - self._begun)

    def drop_masks(self) -> None:
        """Clear the masks of sharded embeddings, because DTensor does not release the masks of a failed pass."""
        for mask in self._masks.values():
            mask.data, mask.refcount = None, 0
        self._masks.clear()

    def _log_integers(self, arguments: Sequence[Any], result: Any) -> None:
        """Log a collective if it carries integers. For other collectives, this takes about a microsecond."""
        first = arguments[isinstance(arguments[0], dist.ProcessGroup)]
        if torch.compiler.is_compiling() or not self._logs or (isinstance(first, Tensor) and is_float(first)):
            return
        tensors = [each for each in tree_iter(arguments) if isinstance(each, Tensor)]
        if not all(map(is_float, tensors)):
            self._log.append(Exchange(tensors, result))


def _call_after(owner: Any, name: str, hook: Hook) -> Callable[[], None]:
    """Wrap a function so that `hook` gets the arguments and result of each call. Return a function that undoes it."""
    original, hooks = _HOOKS.setdefault((id(owner), name), (vars(owner)[name], []))
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        for each in hooks:
            each((*args, kwargs), result)
        return result

    def remove() -> None:
        hooks.remove(hook)
        if not hooks:
            setattr(owner, name, original)
            del _HOOKS[id(owner), name]

    if not hooks:
        setattr(owner, name, call)
    hooks.append(hook)
    return remove


def _attributes_of(model: nn.Module) -> Iterator[dict[str, Any]]:
    for module in model.modules():
        yield from (vars(module), module._buffers, module._parameters)
    yield from map(vars, fsdp.states_of(model))
