"""The collective ledger: what a microbatch communicates under FSDP2, so that it can be finished without one.

FSDP2's collectives depend on the parameters alone. When a rank fails in the middle of a pass, its peers need
partners for the collectives that they will still issue, not the failed rank's data. The ledger stands between
FSDP2 and its collectives, counts them, knows from an earlier microbatch what follows each position, and
issues the rest with zeros.

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

    kind: type[AllGather] | type[ReduceScatter]
    numel: int
    """Of the unsharded side."""
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    # Some reductions compare by identity; which one it is follows from the dtype and the group.
    op: Any = field(compare=False)
    comm: Any = field(compare=False)


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
        self._already_issued = 0  # collectives that a replay leaves out
        self._root: Any = root if isinstance(root, FSDPModule) else None
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
        """Starts counting, from a state in which every microbatch communicates the same."""
        self.position = 0
        self._microbatches = microbatches
        if self._root is not None:
            # Cannot be repeated when it fails halfway, so it must not happen inside of a microbatch.
            self._root._get_fsdp_state()._lazy_init()
            # An evaluation pass leaves unsharded parameters behind, and an order that prefetching follows.
            if not _is_idle(self._root):
                self.reset()

    def begin_microbatch(self) -> None:
        self._current = []

    def end_microbatch(self) -> None:
        """Records what a microbatch communicates, or compares with the record."""
        seen = tuple(self._current)
        if self._record is None:
            self._record = seen
        elif seen != self._record:
            self._record_varies = True

    def issue(self, collective: Collective, call: Callable[..., Any], async_op: bool) -> Any:
        """Collective: runs `call`, and counts it from the moment that peers can match it."""
        self._current.append(collective)
        if self._already_issued > 0:
            self._already_issued -= 1
            return None
        # gloo handles tensors inside wait(), which may run out of memory after peers matched the collective.
        # NCCL's wait() handles none, and its synchronous path uses another stream than its asynchronous one.
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

        Without a record, `replay` (a forward and backward of any size) first finishes the running microbatch.
        """
        if not self._originals:
            return
        if self._record_varies:
            raise RecoveryUnsupportedError(
                "out of memory, and what a microbatch communicates changes from one to the next, so what the "
                "peers still expect is not known; set adaptive.recover_from_oom: False and lower batch_size"
            )
        record = self._record or self._record_by_replay(replay)
        for collective in (record * self._microbatches)[self.position :]:
            self._issue_zeros(collective)

    def _record_by_replay(self, replay: Callable[[], object]) -> tuple[Collective, ...]:
        """Collective: finishes the step's first microbatch, leaving out what it has already communicated."""
        self._already_issued = self.position
        self.begin_microbatch()
        try:
            replay()
        finally:
            self._already_issued = 0
        self._record = tuple(self._current)
        return self._record

    def _issue_zeros(self, collective: Collective) -> None:
        group, comm = collective.group, collective.comm
        whole = comm.allocate((collective.numel,), dtype=collective.dtype, device=collective.device)
        whole.zero_()
        shard = whole.chunk(group.size())[group.rank()]
        if collective.kind is AllGather:
            call = partial(comm, output_tensor=whole, input_tensor=shard, group=group)
        else:
            sums = torch.empty_like(shard)
            call = partial(comm, output_tensor=sums, input_tensor=whole, group=group, op=collective.op)
        self.issue(collective, call, async_op=False)

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


class _Counted:
    """A collective of FSDP that tells the ledger before it communicates."""

    def __init__(self, ledger: CollectiveLedger, comm: Any) -> None:
        self._ledger, self._comm = ledger, comm

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer: torch.Tensor = self._comm.allocate(size, dtype=dtype, device=device)
        return buffer


class _CountedAllGather(_Counted, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Collective: FSDP's own all-gather."""
        whole = output_tensor
        this = Collective(AllGather, whole.numel(), whole.dtype, whole.device, group, None, self._comm)
        call = partial(self._comm, output_tensor=whole, input_tensor=input_tensor, group=group)
        return self._ledger.issue(this, call, async_op)


class _CountedReduceScatter(_Counted, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Collective: FSDP's own reduce-scatter."""
        whole = input_tensor
        this = Collective(ReduceScatter, whole.numel(), whole.dtype, whole.device, group, op, self._comm)
        call = partial(self._comm, output_tensor=output_tensor, input_tensor=whole, group=group, op=op)
        return self._ledger.issue(this, call, async_op)


def why_recovery_is_off(model: nn.Module) -> str | None:
    """Why a step of this model cannot be run again after running out of memory; None if it can."""
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters()):
        return "hooks use gradients as soon as they are ready (optimizer_in_bwd), so backward updates weights"
    if world_size() == 1:
        return None
    if not isinstance(model, FSDPModule):
        return "the model is not wrapped by fully_shard, so what its ranks communicate is not known"
    groups = [group for module in _modules(model) for group in _groups(module)]
    reasons = [reason for group in groups if (reason := _why_group_is_unsupported(group))]
    if reasons:
        return reasons[0]
    sharded = {id(parameter.sharded_param) for group in groups for parameter in group.fsdp_params}
    if any(isinstance(p, DTensor) and id(p) not in sharded for p in model.parameters()):
        return "some parameters are distributed in another way than by fully_shard (tensor parallel)"
    return None


def _why_group_is_unsupported(group: Any) -> str | None:
    if any(parameter.sharded_param.device_mesh.ndim > 1 for parameter in group.fsdp_params):
        return "its mesh has more than one dimension (tensor parallel or HSDP)"
    if group.mesh_info.shard_process_group.size() != world_size():
        return "it is sharded over some of the ranks only"
    if group._all_reduce_hook is not None:
        return "it has an all-reduce hook, whose collectives are not known"
    return None


def _modules(root: Any) -> Iterator[FSDPModule]:
    modules = root.modules() if root is not None else ()
    return (module for module in modules if isinstance(module, FSDPModule))


def _groups(module: FSDPModule) -> list[Any]:
    """The parameter groups of one module: none or one, or (from torch 2.12) one for each of its meshes."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _is_idle(root: Any) -> bool:
    if root._get_fsdp_state()._comm_ctx.post_forward_order:
        return False
    return all(group.is_sharded for module in _modules(root) for group in _groups(module))


def _reset_iter_state(root: Any) -> None:
    """What FSDPModule.reset_iter_state does, which is public from torch 2.13."""
    state = root._get_fsdp_state()
    # Nothing is in flight after that, so the events that FSDP would wait for can simply be dropped. It cannot
    # block for ever: peers need nothing from this rank to issue what this rank has issued already.
    state._device_handle.synchronize()
    comm = state._comm_ctx
    comm.all_gather_state = None
    comm.post_forward_order.clear()
    if hasattr(comm, "reduce_scatter_states"):  # from torch 2.12
        comm.reduce_scatter_states.clear()
    else:
        comm.reduce_scatter_state = None
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
    for module in _modules(root):
        for group in _groups(module):
            _reset_group(group)
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _reset_group(group: Any) -> None:
    if group._all_gather_result is not None:
        work = group._all_gather_result.all_gather_work
        if work is not None:
            work.wait()
        group._all_gather_result = None
    group._post_reduce_event = None
    group._all_reduce_state = None
    group._reshard_after_forward_event = None
    group._post_forward_indices.clear()
    group._training_state = TrainingState.IDLE


def _reset_parameters(group: Any) -> None:
    """What reset_iter_state leaves behind: unsharded gradients, which the next pass would add to its own."""
    for parameter in group.fsdp_params:
        # Also where the group claims to be sharded: some of its parameters may have been allocated already.
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
