"""Access to FSDP2's private state: decides whether a step can be repeated, and resets FSDP2 between attempts.

No other module uses private names of FSDP2. `_TOUCHED` lists them. If the installed torch lacks one, the import of this
module fails. Otherwise the error would appear only in the first recovery.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
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

__all__ = ["AllGather", "FSDPModule", "FSDPParamGroup", "ReduceScatter"]

_TOUCHED: dict[Any, str] = {
    FSDPModule: "_get_fsdp_state reset_iter_state reshard set_custom_all_gather set_custom_reduce_scatter "
    "set_requires_all_reduce set_requires_gradient_sync",
    FSDPState: "_comm_ctx _fsdp_param_groups _lazy_init",
    FSDPCommContext: "post_forward_order",
    FSDPParamGroup: "_all_gather_comm _all_reduce_hook _module_fqn _partial_reduce_output _post_forward_indices "
    "_reduce_scatter_comm _sharded_state fsdp_params is_sharded mesh_info reduce_grads reshard_after_backward unshard",
    FSDPParam: "_extensions_data _sharded_local_tensor _unsharded_param all_gather_inputs grad_offload_event "
    "_module_info param_dtype sharded_param to_sharded unsharded_accumulated_grad",
    DDPMeshInfo: "mesh replicate_mesh_dim replicate_process_group shard_mesh_dim",
    AllGather.__call__: "async_op group input_tensor output_tensor",
    ReduceScatter.__call__: "async_op group input_tensor op output_tensor",
}
"""The private names in use: attributes by class, parameters by function."""


def missing_names(touched: dict[Any, str]) -> list[str]:
    """Return the names that the installed torch lacks."""
    return [
        f"{owner.__qualname__}.{name}" if isinstance(owner, type) else f"{name} in {owner.__qualname__}()"
        for owner, names in touched.items()
        for name in names.split()
        if name not in _names_of(owner)
    ]


def _names_of(owner: Any) -> set[str]:
    """Return the parameters of a function, or the attributes of a class, including those that its methods assign."""
    if not isinstance(owner, type):
        return set(inspect.signature(owner).parameters)
    members = [inspect.unwrap(getattr(each, "fget", None) or each) for each in vars(owner).values() if callable(each)]
    mentioned = {name for each in members if hasattr(each, "__code__") for name in each.__code__.co_names}
    return mentioned | {*dir(owner), *owner.__annotations__}


if missing := missing_names(_TOUCHED):
    refuse_torch(f"FSDP2 has no {', '.join(missing)}")


def replace_collectives(
    root: FSDPModule,
    gather_through: Callable[[AllGather, FSDPParamGroup], Any],
    scatter_through: Callable[[ReduceScatter], Any],
    reduce_through: Callable[[dist.ProcessGroup, ReduceScatter], Any],
) -> Callable[[], None]:
    """Wrap FSDP's collectives in every module with these functions. Return a function that undoes it.

    The returned function restores only collectives that were not replaced again in the meantime. FSDP2 has no setter
    for the all-reduce over replicas, so the process group in the module's mesh is replaced instead.
    """
    replacements: list[tuple[Any, str, object, object]] = []
    meshes = set()
    for module in _modules(root):
        for group in _groups(module):
            gather, scatter, mesh = group._all_gather_comm, group._reduce_scatter_comm, group.mesh_info
            module.set_custom_all_gather(gather_through(gather, group))
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
    """Return why a step of this model cannot be repeated after an out-of-memory error; None if it can."""
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
    if not exchanges_activations(model) and any(len(_groups(each)) > 1 for each in _modules(model)):
        return "a module has parameters on several meshes, and FSDP's setters for collectives accept only one"
    if any(group._all_reduce_hook is not None for group in groups):
        return "it has an all-reduce hook, whose collectives are unknown"
    comms = [each for group in groups for each in (group._all_gather_comm, group._reduce_scatter_comm)]
    if any("SymmMem" in type(each).__name__ for each in comms):
        return "it uses symmetric memory (set_symm_mem_for_comm), and a failed rank would allocate other buffers of it"
    return varying_setting(groups)


def why_hooks_forbid_it(model: nn.Module) -> str | None:
    """Return why gradient hooks prevent the repetition of a step; None if there are no such hooks."""
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters()):
        return (
            "hooks use gradients during backward (for example, an optimizer in the backward), and would use them twice"
        )
    return None


@torch.no_grad()
def copy_shards(group: FSDPParamGroup, gathered: Tensor, *, ones_if_empty: bool = False) -> None:
    """Copy the parameters of this rank into `gathered`, the input of their all-gather. With `ones_if_empty`, parameters
    of which this rank has no element are ones, instead of padding.

    If FSDP gathers something else, nothing is copied: a quantized tensor with its own all-gather, or what a forward has
    resharded to a part of the ranks (`reshard_after_forward` is a number).
    """
    own_gather = any(hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather") for each in group.fsdp_params)
    if group.is_sharded and not own_gather:
        given = [(each, parameter) for parameter in group.fsdp_params for each in parameter.all_gather_inputs]
        empty = [ones_if_empty and not parameter._sharded_local_tensor.numel() for _, parameter in given]
        inputs = [torch.ones_like(each) if ones else each for (each, _), ones in zip(given, empty, strict=True)]
        if sum(each.nbytes for each in inputs) == gathered.nbytes:
            torch.cat([each.view(gathered.dtype) for each in inputs], out=gathered)


def is_whole(model: nn.Module) -> bool:
    """Return True if every rank holds the whole model, so that microbatches do not communicate."""
    sharded = any(isinstance(each, FSDPModule) for each in model.modules())
    return not sharded and not any(isinstance(each, DTensor) for each in model.parameters())


def spans_all_ranks(model: nn.Module) -> bool:
    """Return True if FSDP2 shards or replicates the model over all ranks, in meshes of one or two dimensions."""
    groups = groups_of(model)
    return bool(groups) and all(group.mesh_info.mesh.size() == world_size() for group in groups)


def exchanges_activations(model: nn.Module) -> bool:
    """Return True if a parameter has a mesh dimension that is neither FSDP2's shards nor its replicas. Examples are
    tensor and expert parallelism."""
    groups = groups_of(model)
    # not `sharded_param`: transformers replaces parameters when it loads weights into a model that FSDP has sharded
    infos = [parameter._module_info for group in groups for parameter in group.fsdp_params]
    places = ((module, each.param_name) for each in infos for module in (each.module, *each.shared_modules))
    by_fsdp = {id(getattr(module, name, None)) for module, name in places}
    if any(isinstance(each, DTensor) and id(each) not in by_fsdp for each in model.parameters()):
        return True
    for group in groups:
        known = sum(dim is not None for dim in (group.mesh_info.shard_mesh_dim, group.mesh_info.replicate_mesh_dim))
        if any(cast(DTensor, parameter.sharded_param).device_mesh.ndim > known for parameter in group.fsdp_params):
            return True
    return False


def states_of(model: nn.Module) -> Iterator[object]:
    """Yield the FSDP2 objects of a model whose attributes change in a forward or backward."""
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


def gathered_bytes(root: FSDPModule) -> list[int]:
    """Return the bytes of each parameter group if it is gathered."""
    cast(Any, root)._get_fsdp_state()._lazy_init()  # which sets the dtypes
    return [
        sum(
            each.sharded_param.numel() * (each.param_dtype or each.sharded_param.dtype).itemsize
            for each in group.fsdp_params
        )
        for group in groups_of(root)
    ]


def _groups(module: FSDPModule) -> list[FSDPParamGroup]:
    """Return the parameter groups of one module. It has one group for each mesh of its parameters."""
    return list(cast(Any, module._get_fsdp_state())._fsdp_param_groups)


def names_of_replica_groups(model: nn.Module) -> Iterator[str]:
    """Yield the names of the process groups over which FSDP all-reduces gradients."""
    for group in groups_of(model):
        if isinstance(group.mesh_info, DDPMeshInfo):
            yield group.mesh_info.replicate_process_group.group_name


def has_replicas(root: Any) -> bool:
    """Return True if gradients are all-reduced over replicas: a two-dimensional mesh, or `replicate()`."""
    return any(isinstance(group.mesh_info, DDPMeshInfo) for group in groups_of(root))


def modules_awaiting_all_reduce(root: FSDPModule) -> list[str]:
    """Return the names of modules whose gradients were reduce-scattered, but not yet all-reduced over replicas."""
    return [group._module_fqn or "the model" for group in groups_of(root) if group._partial_reduce_output is not None]


def abandon(root: FSDPModule) -> None:
    """Drop unreduced gradients of an aborted step, without waiting for collectives: peers may have exited."""
    for group in groups_of(root):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            _drop_unsharded_gradient(parameter)


def check_gradients_reduced(groups: Iterable[FSDPParamGroup]) -> None:
    """Raise ValueError if there are gradients that were not reduce-scattered."""
    for parameter in (each for group in groups for each in group.fsdp_params):
        unsharded = getattr(parameter, "_unsharded_param", None)
        if parameter.unsharded_accumulated_grad is not None or getattr(unsharded, "grad", None) is not None:
            raise ValueError(
                "gradients were not reduce-scattered (set_requires_gradient_sync(False)), so they are missing in this "
                "step and would be added to the next one: do not call set_requires_gradient_sync"
            )


def _drop_unsharded_gradient(parameter: FSDPParam) -> None:
    if hasattr(parameter, "_unsharded_param"):
        parameter._unsharded_param.grad = None
    # since torch 2.15, this attribute is a property that returns the gradient dropped above
    if not isinstance(vars(FSDPParam).get("unsharded_accumulated_grad"), property):
        cast(Any, parameter).unsharded_accumulated_grad = None


def varying_setting(groups: Iterable[FSDPParamGroup]) -> str | None:
    """Return the setting of FSDP that makes microbatches issue different collectives, or None."""
    for group in groups:
        if (group.reduce_grads and group.reshard_after_backward) or not any(trainable([group])):
            continue
        if not group.reduce_grads:
            return "set_requires_gradient_sync(False) delays the reduce-scatter of gradients"
        return "set_reshard_after_backward(False) keeps parameters gathered for the next microbatch"
    return None


def trainable(groups: Iterable[FSDPParamGroup]) -> tuple[bool, ...]:
    """Return for each parameter whether it is trained. FSDP does not communicate gradients of frozen ones."""
    return tuple(parameter.sharded_param.requires_grad for group in groups for parameter in group.fsdp_params)


def prepare(root: FSDPModule) -> None:
    """Prepare a step: run FSDP's lazy initialization, and reset what an evaluation or an aborted pass has left."""
    # before the first microbatch, because it cannot be repeated if it runs out of memory halfway
    root._get_fsdp_state()._lazy_init()
    idle = not awaits_backward(root) and not modules_awaiting_all_reduce(root)
    if not (idle and all(group.is_sharded for group in groups_of(root))):
        reset(root)


def awaits_backward(root: FSDPModule) -> bool:
    """Return True after a forward whose backward has not run. Costs little, so it is called in every microbatch."""
    return bool(root._get_fsdp_state()._comm_ctx.post_forward_order)


def end_pass_without_backward(root: FSDPModule) -> None:
    """Reshard after a forward without a backward, and clear the order that FSDP keeps for the backward. Unlike `reset`,
    this does not wait for the GPU: parameters are freed in stream order."""
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
    # `reset_iter_state` does not clear the following, which the next pass would use:
    for group in groups_of(root):
        for parameter in group.fsdp_params:
            # for each parameter, because some may be allocated although their group is marked as sharded
            parameter.to_sharded()
            _drop_unsharded_gradient(parameter)
            # the copy of the gradient to the host may not be complete
            if parameter.grad_offload_event is not None:
                parameter.grad_offload_event.synchronize()
                parameter.grad_offload_event = None
            # tensor subclasses with their own all-gather, such as NF4, keep data between its start and its end
            if hasattr(parameter, "_extensions_data"):
                parameter._extensions_data.clear()
        # `group._to_sharded()` would do nothing for a group that is marked as sharded
        group._sharded_state = ShardedState.SHARDED
