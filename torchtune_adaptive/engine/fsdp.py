"""FSDP2's private state: check whether a step can be repeated, and reset FSDP2 to its state between two steps.

No other module uses private names of FSDP2. `_TOUCHED` lists them. If the installed torch lacks one, importing this
module fails, instead of the first recovery.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.dependencies import refuse_torch
from torchtune_adaptive.engine.ranks import world_size

try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
except ImportError as error:
    refuse_torch(str(error))

__all__ = ["AllGather", "FSDPModule", "ReduceScatter"]

_TOUCHED: dict[Any, str] = {
    FSDPModule: "_get_fsdp_state reset_iter_state reshard set_custom_all_gather set_custom_reduce_scatter "
    "set_requires_all_reduce",
    FSDPState: "_comm_ctx _fsdp_param_groups _lazy_init",
    FSDPCommContext: "post_forward_order",
    FSDPParamGroup: "_all_gather_comm _all_reduce_hook _module_fqn _partial_reduce_output _post_forward_indices "
    "_reduce_scatter_comm _sharded_state fsdp_params is_sharded mesh_info reduce_grads reshard_after_backward",
    FSDPParam: "_extensions_data _unsharded_param grad_offload_event sharded_param to_sharded "
    "unsharded_accumulated_grad",
    DDPMeshInfo: "mesh replicate_mesh_dim replicate_process_group shard_mesh_dim",
    AllGather.__call__: "async_op group input_tensor output_tensor",
    ReduceScatter.__call__: "async_op group input_tensor op output_tensor",
}
"""Attributes by class, parameters by function."""


def missing_names(touched: dict[Any, str]) -> list[str]:
    """Return the names that the installed torch lacks."""
    return [
        f"{owner.__qualname__}.{name}" if isinstance(owner, type) else f"{name} in {owner.__qualname__}()"
        for owner, names in touched.items()
        for name in names.split()
        if name not in _names_of(owner)
    ]


def _names_of(owner: Any) -> set[str]:
    """Return the attributes of a class, also those that only its methods assign, or the parameters of a function."""
    if not isinstance(owner, type):
        return set(inspect.signature(owner).parameters)
    members = [inspect.unwrap(getattr(each, "fget", None) or each) for each in vars(owner).values() if callable(each)]
    mentioned = {name for each in members if hasattr(each, "__code__") for name in each.__code__.co_names}
    return mentioned | {*dir(owner), *owner.__annotations__}


if missing := missing_names(_TOUCHED):
    refuse_torch(f"FSDP2 has no {', '.join(missing)}")


def replace_collectives(
    root: FSDPModule,
    gather_through: Callable[[AllGather], Any],
    scatter_through: Callable[[ReduceScatter], Any],
    reduce_through: Callable[[dist.ProcessGroup, ReduceScatter], Any],
) -> Callable[[], None]:
    """Wrap the collectives of every module. Return a function that restores FSDP's, unless they were wrapped again.

    FSDP2 has no setter for the all-reduce over replicas, so the process group in the module's mesh is replaced.
    """
    replacements: list[tuple[Any, str, object, object]] = []
    meshes = set()
    for module in _modules(root):
        for group in _groups(module):
            gather, scatter, mesh = group._all_gather_comm, group._reduce_scatter_comm, group.mesh_info
            module.set_custom_all_gather(gather_through(gather))
            module.set_custom_reduce_scatter(scatter_through(scatter))
            replacements.append((group, "_all_gather_comm", gather, group._all_gather_comm))
            replacements.append((group, "_reduce_scatter_comm", scatter, group._reduce_scatter_comm))
            if isinstance(mesh, DDPMeshInfo) and id(mesh) not in meshes:  # groups may share a mesh
                meshes.add(id(mesh))
                own = mesh.replicate_process_group
                mesh.replicate_process_group = reduce_through(own, scatter)
                replacements.append((mesh, "replicate_process_group", own, mesh.replicate_process_group))

    def restore() -> None:
        for owner, name, original, replacement in replacements:
            if getattr(owner, name) is replacement:
                setattr(owner, name, original)

    return restore


def why_recovery_is_off(model: nn.Module) -> str | None:
    """Return the reason why a step of this model cannot be repeated after an out-of-memory error, if there is one."""
    if hooks := why_hooks_forbid_it(model):
        return hooks
    if world_size() == 1:
        return None
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel communicates in the backward (pass its `module` instead)"
    if is_whole(model):
        return None
    if not isinstance(model, FSDPModule) and any(isinstance(each, FSDPModule) for each in model.modules()):
        return (
            "fully_shard was applied to parts of the model but not to the model itself, so its collectives are unknown "
            "(apply it to the model, too, or pass only the sharded part)"
        )
    groups = groups_of(model)
    spans = [each.device_mesh.size() == world_size() for each in model.parameters() if isinstance(each, DTensor)]
    if not (any(spans) if exchanges_activations(model) else all(spans)):
        return "it is sharded over only some of the ranks"
    if any(group._all_reduce_hook is not None for group in groups):
        return "it has an all-reduce hook, whose collectives are unknown"
    return why_unsteady(groups)


def why_hooks_forbid_it(model: nn.Module) -> str | None:
    """Return the reason why gradient hooks prevent a repetition, if they do."""
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters()):
        return (
            "hooks use gradients during backward (for example, an optimizer in the backward), and would use them twice"
        )
    return None


def is_whole(model: nn.Module) -> bool:
    """Return True if every rank holds the whole model, so that microbatches do not communicate."""
    sharded = any(isinstance(each, FSDPModule) for each in model.modules())
    return not sharded and not any(isinstance(each, DTensor) for each in model.parameters())


def gathers_from_all(model: nn.Module) -> bool:
    """Return True if all ranks take part in each collective of the model: one mesh of shards, no replicas."""
    groups = groups_of(model)
    alone = all(group.mesh_info.mesh.size() == world_size() for group in groups)
    return bool(groups) and alone and not has_replicas(model)


def exchanges_activations(model: nn.Module) -> bool:
    """Return True if a mesh of the parameters has other dimensions than FSDP2's shards and replicas."""
    groups = groups_of(model)
    by_fsdp = {id(parameter.sharded_param) for group in groups for parameter in group.fsdp_params}
    if any(isinstance(each, DTensor) and id(each) not in by_fsdp for each in model.parameters()):
        return True
    for group in groups:
        known = sum(dim is not None for dim in (group.mesh_info.shard_mesh_dim, group.mesh_info.replicate_mesh_dim))
        if any(cast(DTensor, parameter.sharded_param).device_mesh.ndim > known for parameter in group.fsdp_params):
            return True
    return False


def states_of(model: nn.Module) -> Iterator[object]:
    """Yield the objects of FSDP2 whose attributes a pass changes."""
    for module in _modules(model):
        state = module._get_fsdp_state()
        yield from (state, state._comm_ctx)
        for group in _groups(module):
            yield from (group, *group.fsdp_params)


def _modules(root: Any) -> Iterator[FSDPModule]:
    """Yield one module for each FSDP state, since `fully_shard` can wrap several modules together."""
    seen = set()
    for module in root.modules():
        if isinstance(module, FSDPModule) and (state := id(module._get_fsdp_state())) not in seen:
            seen.add(state)
            yield module


def groups_of(root: Any) -> list[FSDPParamGroup]:
    """Return the parameter groups of a model."""
    return [group for module in _modules(root) for group in _groups(module)]


def _groups(module: FSDPModule) -> list[FSDPParamGroup]:
    """Return the parameter groups of one module, one for each mesh."""
    return list(cast(Any, module._get_fsdp_state())._fsdp_param_groups)


def has_replicas(root: Any) -> bool:
    """Return True if gradients are all-reduced over replicas: a two-dimensional mesh, or `replicate()`."""
    return any(isinstance(group.mesh_info, DDPMeshInfo) for group in groups_of(root))


def partially_summed(root: FSDPModule) -> list[str]:
    """Return the modules with gradients that were reduce-scattered but not all-reduced over replicas yet."""
    return [group._module_fqn or "the model" for group in groups_of(root) if group._partial_reduce_output is not None]


def abandon(root: FSDPModule) -> None:
    """Drop unreduced gradients of an aborted step. Does not wait for communication, since peers may have exited."""
    root.set_requires_all_reduce(True)
    for group in groups_of(root):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            _drop_unsharded_gradient(parameter)


def check_scattered(groups: Iterable[FSDPParamGroup]) -> None:
    """Raise ValueError if gradients are not reduce-scattered, as after `set_requires_gradient_sync(False)`."""
    for parameter in (each for group in groups for each in group.fsdp_params):
        unsharded = getattr(parameter, "_unsharded_param", None)
        if parameter.unsharded_accumulated_grad is not None or getattr(unsharded, "grad", None) is not None:
            raise ValueError(
                "gradients were not reduce-scattered (set_requires_gradient_sync(False)), so this step lacks them and "
                "the next one would add them: do not call set_requires_gradient_sync"
            )


def _drop_unsharded_gradient(parameter: FSDPParam) -> None:
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None
    # since torch 2.15 a property that reads this gradient
    if not isinstance(vars(FSDPParam).get("unsharded_accumulated_grad"), property):
        cast(Any, parameter).unsharded_accumulated_grad = None


def why_unsteady(groups: Iterable[FSDPParamGroup]) -> str | None:
    """Return the setting that makes microbatches issue different collectives, if there is one."""
    for group in groups:
        if (group.reduce_grads and group.reshard_after_backward) or not any(trainable([group])):
            continue
        if not group.reduce_grads:
            return "set_requires_gradient_sync(False) delays the reduce-scatter of gradients"
        return "set_reshard_after_backward(False) keeps parameters gathered for the next microbatch"
    return None


def trainable(groups: Iterable[FSDPParamGroup]) -> tuple[bool, ...]:
    """Return for each parameter whether it is trained. Gradients of frozen ones are not communicated."""
    return tuple(parameter.sharded_param.requires_grad for group in groups for parameter in group.fsdp_params)


def prepare(root: FSDPModule) -> None:
    """Prepare a step: run FSDP's lazy initialization, and reset the state that other passes left."""
    # not inside a microbatch: it cannot be repeated if it fails halfway
    root._get_fsdp_state()._lazy_init()
    idle = not awaits_backward(root) and not partially_summed(root)
    if not (idle and all(group.is_sharded for group in groups_of(root))):  # for example, after an evaluation
        reset(root)


def awaits_backward(root: FSDPModule) -> bool:
    """Return True after a forward without its backward. Cheap enough to call after every microbatch."""
    return bool(root._get_fsdp_state()._comm_ctx.post_forward_order)


def end_pass_without_backward(root: FSDPModule) -> None:
    """Return FSDP to idle after a forward without a backward.

    Unlike `reset`, it does not wait: parameters are freed in the order of the stream that used them.
    """
    if not awaits_backward(root):
        return
    for module in _modules(root):
        module.reshard()
        for group in _groups(module):
            group._post_forward_indices.clear()
    root._get_fsdp_state()._comm_ctx.post_forward_order.clear()


def reset(root: FSDPModule) -> None:
    """Return FSDP to its state between two steps, and drop the gradients of an unfinished pass."""
    root.reset_iter_state()
    # It is False if the step ended before its last microbatch. A backward outside of steps needs True.
    root.set_requires_all_reduce(True)
    # `reset_iter_state` keeps the following, which the next pass would use:
    for group in groups_of(root):
        for parameter in group.fsdp_params:
            # even if the group is marked as sharded: some of its parameters may be allocated
            parameter.to_sharded()
            _drop_unsharded_gradient(parameter)
            # the gradient may still be on its way to the host
            if parameter.grad_offload_event is not None:
                parameter.grad_offload_event.synchronize()
                parameter.grad_offload_event = None
            # a tensor subclass with its own all-gather (for example, NF4) keeps data between its two parts
            if hasattr(parameter, "_extensions_data"):
                parameter._extensions_data.clear()
        # not `group._to_sharded()`, which does nothing for a group that is marked as sharded
        group._sharded_state = ShardedState.SHARDED
