"""FSDP2's insides: whether a step can be run again, and how FSDP2 is returned to its state between two steps.

This is the only file that knows them. Everything private that it touches is in one list, `_TOUCHED`, which is compared
with the installed torch at import: a version that lacks a name is refused there, not in the first recovery.
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
"""Names by class, parameters by function."""


def missing_names(touched: dict[Any, str]) -> list[str]:
    """Names that the installed torch does not have."""
    return [
        f"{owner.__qualname__}.{name}" if isinstance(owner, type) else f"{name} in {owner.__qualname__}()"
        for owner, names in touched.items()
        for name in names.split()
        if name not in _names_of(owner)
    ]


def _names_of(owner: Any) -> set[str]:
    """Attributes of a class, those that only its methods mention included; parameters of a function."""
    if not isinstance(owner, type):
        return set(inspect.signature(owner).parameters)
    members = [inspect.unwrap(getattr(each, "fget", None) or each) for each in vars(owner).values() if callable(each)]
    mentioned = {name for each in members if hasattr(each, "__code__") for name in each.__code__.co_names}
    return mentioned | {*dir(owner), *owner.__annotations__}


if missing := missing_names(_TOUCHED):
    refuse_torch(f"FSDP2 has no {', '.join(missing)}")


def replace_collectives(
    root: FSDPModule,
    gather_through: Callable[[AllGather], AllGather],
    scatter_through: Callable[[ReduceScatter], ReduceScatter],
    reduce_through: Callable[[dist.ProcessGroup, ReduceScatter], Any],
) -> Callable[[], None]:
    """Wraps the collectives of every module. Returns a function that restores FSDP's own, unless another wrapper was
    installed on top in the meantime.

    The reduction over replicas has no setter, so the process group in the module's mesh is replaced.
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
            if isinstance(mesh, DDPMeshInfo) and id(mesh) not in meshes:  # groups of one module may share it
                meshes.add(id(mesh))
                own = mesh.replicate_process_group
                mesh.replicate_process_group = reduce_through(own, scatter)
                replacements.append((mesh, "replicate_process_group", own, mesh.replicate_process_group))

    def put_back() -> None:
        for owner, name, own, ours in replacements:
            if getattr(owner, name) is ours:
                setattr(owner, name, own)

    return put_back


def why_recovery_is_off(model: nn.Module) -> str | None:
    """Why a step of this model cannot be repeated after running out of memory; None if it can."""
    if hooks := why_hooks_forbid_it(model):
        return hooks
    if world_size() == 1:
        return None
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel communicates inside the backward: pass the module in it"
    if is_whole(model):
        return None
    if not isinstance(model, FSDPModule) and any(isinstance(each, FSDPModule) for each in model.modules()):
        return (
            "fully_shard has wrapped parts of the model but not the model itself, so its collectives are unknown (wrap "
            "it too, or pass the part that is wrapped)"
        )
    groups = groups_of(model) if isinstance(model, FSDPModule) else []
    spans = [each.device_mesh.size() == world_size() for each in model.parameters() if isinstance(each, DTensor)]
    if not (any(spans) if exchanges_activations(model) else all(spans)):
        return "it is sharded over only some of the ranks"
    if any(group._all_reduce_hook is not None for group in groups):
        return "it has an all-reduce hook, whose collectives are unknown"
    return why_unsteady(groups)


def why_hooks_forbid_it(model: nn.Module) -> str | None:
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters()):
        return (
            "hooks use gradients during backward (for example, an optimizer in the backward), and would use them twice"
        )
    return None


def is_whole(model: nn.Module) -> bool:
    """Whether every rank holds all of the model, so that a microbatch has nothing to communicate."""
    sharded = any(isinstance(each, FSDPModule) for each in model.modules())
    return not sharded and not any(isinstance(each, DTensor) for each in model.parameters())


def gathers_from_all(model: nn.Module) -> bool:
    """Whether each collective of the model needs every rank: one mesh of shards, without replicas."""
    groups = groups_of(model) if isinstance(model, FSDPModule) else []
    alone = all(group.mesh_info.mesh.size() == world_size() for group in groups)
    return bool(groups) and alone and not has_replicas(cast(FSDPModule, model))


def scatters_gradients(model: FSDPModule) -> bool:
    """Whether every microbatch scatters its gradients: replicas that are not sharded only sum them, once a step."""
    meshes = [group.mesh_info for group in groups_of(model)]
    return all(mesh.shard_mesh_dim is not None and mesh.mesh.size(mesh.shard_mesh_dim) > 1 for mesh in meshes)


def exchanges_activations(model: nn.Module) -> bool:
    """Whether a mesh of its parameters has dimensions other than FSDP2's shards and replicas."""
    groups = groups_of(model) if isinstance(model, FSDPModule) else []
    by_fsdp = {id(parameter.sharded_param) for group in groups for parameter in group.fsdp_params}
    if any(isinstance(each, DTensor) and id(each) not in by_fsdp for each in model.parameters()):
        return True
    for group in groups:
        known = sum(dim is not None for dim in (group.mesh_info.shard_mesh_dim, group.mesh_info.replicate_mesh_dim))
        if any(cast(DTensor, parameter.sharded_param).device_mesh.ndim > known for parameter in group.fsdp_params):
            return True
    return False


def states_of(model: nn.Module) -> Iterator[object]:
    """The objects in which FSDP2 keeps what a pass changes."""
    for module in _modules(model):
        state = module._get_fsdp_state()
        yield from (state, state._comm_ctx)
        for group in _groups(module):
            yield from (group, *group.fsdp_params)


def _modules(root: Any) -> Iterator[FSDPModule]:
    """One module per FSDP state: the first of those that `fully_shard` wrapped together."""
    seen = set()
    for module in root.modules() if root is not None else ():
        if isinstance(module, FSDPModule) and (state := id(module._get_fsdp_state())) not in seen:
            seen.add(state)
            yield module


def groups_of(root: FSDPModule) -> list[FSDPParamGroup]:
    return [group for module in _modules(root) for group in _groups(module)]


def _groups(module: FSDPModule) -> list[FSDPParamGroup]:
    """The parameter groups of one module: none, or one for each of its meshes."""
    return list(cast(Any, module._get_fsdp_state())._fsdp_param_groups)


def has_replicas(root: FSDPModule) -> bool:
    """Whether gradients are also summed over replicas: a two-dimensional mesh, or `replicate()`."""
    return any(isinstance(group.mesh_info, DDPMeshInfo) for group in groups_of(root))


def partially_summed(root: FSDPModule) -> list[str]:
    """Modules with gradients that are not summed over replicas yet: the next backward would add them to its own."""
    return [group._module_fqn or "the model" for group in groups_of(root) if group._partial_reduce_output is not None]


def abandon(root: FSDPModule) -> None:
    """Cleans up after an aborted step, so that the next backward adds nothing of it. Waits for nothing, since peers may
    have exited."""
    root.set_requires_all_reduce(True)
    for group in groups_of(root):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            _drop_whole_gradient(parameter)


def check_scattered(groups: Iterable[FSDPParamGroup]) -> None:
    """Raises if gradients were left unreduced, as `set_requires_gradient_sync(False)` leaves them."""
    for parameter in (each for group in groups for each in group.fsdp_params):
        whole = getattr(parameter, "_unsharded_param", None)
        if parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
            raise ValueError(
                "gradients were not reduce-scattered (set_requires_gradient_sync(False)), so they are missing from a "
                "step and would be added to the next one's: leave that to the step"
            )


def _drop_whole_gradient(parameter: FSDPParam) -> None:
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None
    # From torch 2.15 on this only reads the gradient above.
    if not isinstance(vars(FSDPParam).get("unsharded_accumulated_grad"), property):
        cast(Any, parameter).unsharded_accumulated_grad = None


def why_unsteady(groups: Iterable[FSDPParamGroup]) -> str | None:
    """Why microbatches issue different collectives, by a setting of the user's; None if they do not."""
    for group in groups:
        if (group.reduce_grads and group.reshard_after_backward) or not any(trainable([group])):
            continue
        if not group.reduce_grads:
            return "set_requires_gradient_sync(False) delays the reduce-scatter of gradients"
        return "set_reshard_after_backward(False) keeps parameters gathered for the next microbatch"
    return None


def trainable(groups: Iterable[FSDPParamGroup]) -> tuple[bool, ...]:
    """Whether each weight is trained. A frozen one has no gradient to communicate."""
    return tuple(parameter.sharded_param.requires_grad for group in groups for parameter in group.fsdp_params)


def prepare(root: FSDPModule) -> None:
    """Before a step: runs FSDP's lazy initialization, and resets what a pass outside of steps left."""
    # The initialization cannot be repeated if it fails halfway, so it must not run inside a microbatch.
    root._get_fsdp_state()._lazy_init()
    begun = awaits_backward(root) or partially_summed(root)
    if begun or not all(group.is_sharded for group in groups_of(root)):  # for example, after an evaluation
        reset(root)


def awaits_backward(root: FSDPModule) -> bool:
    """Whether a forward has run whose backward has not. Cheap enough to ask after every microbatch."""
    return bool(root._get_fsdp_state()._comm_ctx.post_forward_order)


def settle(root: FSDPModule) -> None:
    """Returns FSDP to idle after a forward without a backward.

    Unlike `reset`, it waits for nothing: parameters are freed in the order of the stream that used them.
    """
    if not awaits_backward(root):
        return
    for module in _modules(root):
        module.reshard()
        for group in _groups(module):
            group._post_forward_indices.clear()
    root._get_fsdp_state()._comm_ctx.post_forward_order.clear()


def reset(root: FSDPModule) -> None:
    """Returns FSDP to its state between two steps, and drops the gradients of an unfinished pass."""
    root.reset_iter_state()
    # Off if the step ended before its last microbatch. A backward outside of steps relies on it.
    root.set_requires_all_reduce(True)
    # What `reset_iter_state` leaves behind, and the next pass would add to its own gradients:
    for group in groups_of(root):
        for parameter in group.fsdp_params:
            # Even if the group claims to be sharded: some of its parameters may be allocated already.
            parameter.to_sharded()
            _drop_whole_gradient(parameter)
            # A gradient may still be on its way to the host.
            if parameter.grad_offload_event is not None:
                parameter.grad_offload_event.synchronize()
                parameter.grad_offload_event = None
            # A weight with its own all-gather (for example, NF4) keeps data between the two halves of it.
            if hasattr(parameter, "_extensions_data"):
                parameter._extensions_data.clear()
        # The group's own method would skip all of this if the group claims to be sharded.
        group._sharded_state = ShardedState.SHARDED
