"""The collective ledger: what a microbatch communicates under FSDP2, so that it can be finished without the microbatch.

FSDP2's collectives depend on the parameters alone. When a rank fails in the middle of a pass, its peers need partners
for the collectives that they will still issue, not the failed rank's data. The ledger stands between FSDP2 and its
collectives, counts them, knows from an earlier microbatch what follows each position, and issues the rest with zeros.

This is the only file that knows FSDP2's insides. Written against torch 2.11, 2.12 and 2.13.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor

from torchtune_adaptive.collectives import backend_for, explaining_failures, world_size
from torchtune_adaptive.errors import RecoveryUnsupportedError


@dataclass(frozen=True)
class Collective:
    """One collective, with all that a partner without the data needs to take part in it."""

    numel: int  # of the unsharded side
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    # Some reductions compare by identity; what they do follows from the dtype and the group.
    op: Any = field(compare=False)
    comm: AllGather | ReduceScatter = field(compare=False)
    gathers: bool = True


class CollectiveLedger:
    """Counts FSDP's collectives since the step began, and issues those that are still to come.

    `position` is where this rank is in the step; at the end of a step all ranks are at the same position.
    """

    def __init__(self, root: nn.Module | None) -> None:
        """Watches the collectives of `root`; None watches nothing."""
        self.position = 0
        self._microbatches = 0
        self._record: tuple[Collective, ...] | None = None  # what one microbatch communicates
        self._record_varies = False
        self._current: list[Collective] = []  # what the running microbatch has communicated
        self._already_issued = 0  # collectives that a replay has to leave out
        self._root = root if isinstance(root, FSDPModule) else None
        self._originals: list[tuple[Any, AllGather, ReduceScatter]] = []
        if world_size() > 1:
            self._stand_between()

    def _stand_between(self) -> None:
        for module in _modules(self._root):
            for group in _groups(module):
                gather, scatter = group._all_gather_comm, group._reduce_scatter_comm
                self._originals.append((group, gather, scatter))
                module.set_custom_all_gather(_CountedAllGather(self, gather))
                module.set_custom_reduce_scatter(_CountedReduceScatter(self, scatter))

    def close(self) -> None:
        """Puts FSDP's own collectives back."""
        for group, gather, scatter in self._originals:
            group._all_gather_comm, group._reduce_scatter_comm = gather, scatter
        self._originals.clear()

    def begin_step(self, microbatches: int) -> None:
        """Starts counting. Every microbatch has to start from the same state: prefetching depends on it."""
        self.position = 0
        self._microbatches = microbatches
        if self._root is not None:
            self._root._get_fsdp_state()._lazy_init()  # cannot be repeated, so it must not fail inside a microbatch
            if not _is_idle(self._root):  # an evaluation pass came before
                self.reset()

    def begin_microbatch(self) -> None:
        self._current = []

    def end_microbatch(self) -> None:
        """Keeps, or compares with, the record of what a microbatch communicates."""
        seen = tuple(self._current)
        if self._record is None:
            self._record = seen
        elif seen != self._record:
            self._record_varies = True

    def issue(self, collective: Collective, call: Callable[..., Any], async_op: bool) -> Any:
        """Collective: runs `call`, counting it from the moment that peers can match it."""
        self._current.append(collective)
        if self._already_issued > 0:
            self._already_issued -= 1
            return None
        # gloo works on tensors inside wait(), which may fail after the collective was matched. NCCL's wait() does not,
        # and its synchronous path uses another stream than its asynchronous one.
        wait_here = not async_op and backend_for(collective.device.type, collective.group) == "gloo"
        with explaining_failures("a collective of FSDP"):
            work = call(async_op=async_op or wait_here)
            self.position += 1
            if wait_here:
                work.wait()
                return None
        return work

    def drain(self, replay: Callable[[], object]) -> None:
        """Collective: issues all that is left of this step, so that every peer finishes it.

        Without a record the running microbatch is finished by `replay`, a forward and backward of any size.
        """
        if not self._originals:
            return
        if self._record_varies:
            raise RecoveryUnsupportedError(
                "ran out of memory, and what a microbatch communicates changes from one to the next, so what the peers "
                "still expect is not known; set adaptive.recover_from_oom: False and lower batch_size"
            )
        if self._record is None:
            self._replay(replay)
        for collective in self._rest_of_step():
            self._issue_zeros(collective)

    def _rest_of_step(self) -> Sequence[Collective]:
        assert self._record is not None
        return (self._record * self._microbatches)[self.position :]

    def _replay(self, replay: Callable[[], object]) -> None:
        self._already_issued = self.position
        self.begin_microbatch()
        try:
            replay()
        finally:
            self._already_issued = 0
        self.end_microbatch()

    def _issue_zeros(self, collective: Collective) -> None:
        whole = collective.comm.allocate((collective.numel,), dtype=collective.dtype, device=collective.device)
        whole.zero_()
        shard = whole.chunk(collective.group.size())[collective.group.rank()]
        if collective.gathers:
            tensors = {"output_tensor": whole, "input_tensor": shard}
        else:
            tensors = {"output_tensor": torch.empty_like(shard), "input_tensor": whole, "op": collective.op}
        self.issue(collective, partial(collective.comm, group=collective.group, **tensors), async_op=False)

    def reset(self) -> None:
        """Brings FSDP back to where it is between two steps, without the gradients of an unfinished pass."""
        if self._root is None:
            return
        if hasattr(self._root, "reset_iter_state"):
            self._root.reset_iter_state()
        else:
            _reset_iter_state(self._root)
        for module in _modules(self._root):
            for group in _groups(module):
                _reset_parameters(group)


class _CountedAllGather(AllGather):
    def __init__(self, ledger: CollectiveLedger, inner: AllGather) -> None:
        self._ledger, self._inner = ledger, inner

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Collective: FSDP's all-gather, counted."""
        whole = output_tensor
        seen = Collective(whole.numel(), whole.dtype, whole.device, group, None, self._inner)
        call = partial(self._inner, output_tensor=whole, input_tensor=input_tensor, group=group)
        return self._ledger.issue(seen, call, async_op)


class _CountedReduceScatter(ReduceScatter):
    def __init__(self, ledger: CollectiveLedger, inner: ReduceScatter) -> None:
        self._ledger, self._inner = ledger, inner

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Collective: FSDP's reduce-scatter, counted."""
        whole = input_tensor
        seen = Collective(whole.numel(), whole.dtype, whole.device, group, op, self._inner, gathers=False)
        call = partial(self._inner, output_tensor=output_tensor, input_tensor=whole, group=group, op=op)
        return self._ledger.issue(seen, call, async_op)


def why_recovery_is_off(model: nn.Module) -> str | None:
    """Why a step of this model cannot be run again after running out of memory; None if it can."""
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters()):
        return "hooks run as soon as a gradient is ready (optimizer_in_bwd), so backward already changes the weights"
    if world_size() == 1:
        return None
    if not isinstance(model, FSDPModule):
        return "the model is not wrapped by fully_shard, so what its ranks communicate is not known"
    for module in _modules(model):
        for group in _groups(module):
            if (reason := _why_group_is_unsupported(group)) is not None:
                return reason
    managed = {id(p.sharded_param) for m in _modules(model) for g in _groups(m) for p in g.fsdp_params}
    if any(isinstance(p, DTensor) and id(p) not in managed for p in model.parameters()):
        return "some parameters are distributed, but not by fully_shard, and their collectives are not known"
    return None


def _why_group_is_unsupported(group: Any) -> str | None:
    if any(parameter.sharded_param.device_mesh.ndim > 1 for parameter in group.fsdp_params):
        return "its mesh has more than one dimension (tensor parallel or HSDP)"
    if group.mesh_info.shard_process_group.size() != world_size():
        return "it is sharded over some of the ranks only"
    if group._all_reduce_hook is not None:
        return "it has an all-reduce hook, whose collectives are not known"
    return None


def _modules(root: nn.Module | None) -> Iterator[FSDPModule]:
    return (module for module in root.modules() if isinstance(module, FSDPModule)) if root is not None else iter(())


def _groups(module: FSDPModule) -> list[Any]:
    """The parameter groups of one module: none, one, or (from torch 2.12) one for each of its meshes."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _is_idle(root: FSDPModule) -> bool:
    groups = [group for module in _modules(root) for group in _groups(module)]
    return not root._get_fsdp_state()._comm_ctx.post_forward_order and all(group.is_sharded for group in groups)


def _reset_parameters(group: Any) -> None:
    """What reset_iter_state leaves behind: unsharded gradients would be added to those of the repeated step."""
    for parameter in group.fsdp_params:
        # The group may claim to be sharded although some of its parameters were already allocated.
        parameter.to_sharded()
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
        parameter.unsharded_accumulated_grad = None
        if parameter.grad_offload_event is not None:
            parameter.grad_offload_event.synchronize()
            parameter.grad_offload_event = None
        if hasattr(parameter, "_extensions_data"):
            parameter._extensions_data.clear()
    group._sharded_state = ShardedState.SHARDED
