"""Compute small known tensors: at the dispatcher, where torch chooses the CUDA kernel of an operation.

The memory of a null device is memory of the host. If all inputs of an operation are small and known, the CPU's kernel
computes its results, too. Autograd, compilers and subclasses of tensors are above this, and see nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch

from gpu_rehearsal.values.bounds import bounds_of_results
from gpu_rehearsal.values.known import Known, is_large, on_host

Kernel = Callable[..., Any]
_OVERWRITE = {"fill_", "zero_", "copy_", "_foreach_zero_", "_foreach_copy_"}
"""Operations that do not read the tensor that they change."""
_COMPOSITE = "aten::copy_", "aten::isinf", "aten::isfinite"
"""Operations that have no CUDA kernel of their own, and are intercepted nevertheless."""
_OF_NUMBERS = {"pow.Tensor_Tensor_out"}
"""Operations that torch calls with a number on the device, which a kernel in Python cannot receive. Their callers,
such as `pow.Scalar`, are replaced."""
_NUMBERS = bool, int, float, complex


class Kernels:
    """Replaces the CUDA kernels of all operations that return or change tensors, except views and allocations."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self._library = torch.library.Library("aten", "IMPL")  # deleting it would remove its kernels

    def replace(self, name: str, kernel: Kernel, key: str = "CUDA") -> None:
        """Replace the kernel of an operation by one that is called with the same arguments."""
        self._library.impl(name, kernel, key)

    def install(self, handlers: dict[str, Callable[[Kernel], Kernel]]) -> None:
        """Replace the kernels. A handler wraps the new kernel of an operation."""
        for full in torch._C._dispatch_get_all_op_names():
            if not full.startswith("aten::") or (
                full not in _COMPOSITE and not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CUDA")
            ):
                continue
            base, _, overload = (name := full.removeprefix("aten::")).partition(".")
            operation = getattr(attrgetter(base)(torch.ops.aten), overload or "default")
            kernel = self._computing(operation, torch.library.get_kernel(full, "CUDA").call_boxed)
            if name in _OF_NUMBERS:
                continue
            if name in handlers:
                kernel = handlers[name](kernel)
            elif not _writes(operation._schema) or "empty" in base or base in ("set_", "resize_", "record_stream"):
                continue
            self._library.impl(name, kernel, "CUDA", with_keyset=True)
        increment = torch._C._increment_version

        def change(tensors: Any) -> None:
            """Forget tensors that a compiled graph or an operation of the script has changed."""
            for each in tensors:
                if each.is_cuda and torch._C._has_storage(each):
                    self.known.forget(each)
            increment(tensors)

        torch._C._increment_version = change

    def _computing(self, operation: Any, call: Kernel) -> Kernel:
        """Wrap a kernel: compute its results if the inputs are known, and forget what it changes if they are not."""
        arguments, known = operation._schema.arguments, self.known
        tensors = [at for at, each in enumerate(arguments) if str(each.type) == "Tensor" and not each.kwarg_only]
        first_at = next((at for at, each in enumerate(arguments) if "Tensor" in str(each.type)), len(arguments))
        changes = [(at, each.name) for at, each in enumerate(arguments) if each.alias_info and each.alias_info.is_write]
        overwrites = operation._schema.name.partition("::")[2] in _OVERWRITE
        written = {name for at, name in changes if arguments[at].is_out or (overwrites and at == changes[0][0])}
        random = torch.Tag.nondeterministic_seeded in operation.tags
        rule = bounds_of_results(operation)

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            for at in tensors:
                if at < len(args) and isinstance(args[at], _NUMBERS):
                    args = _as_tensors(args, tensors)
            try:
                skip = False
                if not changes:
                    first = args[first_at] if first_at < len(args) else None
                    first = first[0] if first.__class__ is list and first else first
                    skip = not isinstance(first, torch.Tensor) or is_large(first) or not known.has(first)
                    if skip and rule is None:
                        return call(keys, *args, **kwargs)
                changed = [*_tensors_in(args[at] if at < len(args) else kwargs[name] for at, name in changes)]
                found = None if skip or random else self._compute(operation, args, kwargs, changes, written)
                bounds = rule(known, args, kwargs) if rule and found is None else None
                result = call(keys, *args, **kwargs)
                made = changed + [each for each in _tensors_in((result,)) if not any(each is one for one in changed)]
                if found is not None:
                    if not changes and any(a.shape != b.shape for a, b in zip(made, found, strict=True)):
                        moved = [each.to(made[0].device) for each in found]  # its size depends on values
                        return moved[0] if isinstance(result, torch.Tensor) else type(result)(moved)
                    self.write(made, found)
                    return result
                for each in changed:
                    known.forget(each)
                if bounds and not _is_captured():
                    for each, limits in zip(made, bounds, strict=False):
                        if limits and limits[0] == limits[1] and not is_large(each):
                            self.write([each], [torch.tensor(limits[0], device="cpu")])
                        elif limits:
                            known.set_bounds(each, limits)
                return result
            except BaseException:
                del args, kwargs  # the traceback must not keep tensors that a kernel would not keep
                raise

        return run

    def _compute(self, operation: Any, args: Any, kwargs: Any, changes: Any, written: set[str]) -> Any:
        """Return the tensors that an operation changes or returns, computed on the host; None if it cannot."""
        names = [each.name for each in operation._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, each in given.items():
            for tensor in _tensors_in((each,)):
                if tensor.layout is not torch.strided or is_large(tensor):
                    return None
                if name not in written and not self.known.has(tensor):
                    return None
        if _is_captured():
            return None
        with torch._C.DisableTorchFunction():
            copied = {name for _, name in changes}
            hosts = {name: _map(_copy if name in copied else on_host, each) for name, each in given.items()}
            if operation is torch.ops.aten.histc.default:  # the CPU's supports only floats
                hosts["self"] = hosts["self"].float()
            for _, name in changes:
                if name in written and name in kwargs:
                    hosts[name] = hosts[name].new_empty(0)  # an operation resizes its output
            try:
                keywords = {name: hosts[name] for name in kwargs}
                result = operation(*(hosts[name] for name in names[: len(args)]), **keywords)
            except Exception:  # noqa: BLE001 # the CPU has no such kernel, or the script has given a wrong value
                return None
            changed = [*_tensors_in(hosts[name] for _, name in changes)]
            return changed + [each for each in _tensors_in((result,)) if not any(each is one for one in changed)]

    def write(self, tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Write values into the memory of tensors, without a kernel."""
        with torch._C.DisableTorchFunction():
            for tensor, each in zip(tensors, values, strict=True):
                on_host(tensor).copy_(each)
                if tensor.is_cuda:
                    self.known.add(tensor)


def _writes(schema: Any) -> bool:
    """Return True if an operation changes a tensor, or returns one that is not a view."""
    if any(each.alias_info and each.alias_info.is_write for each in schema.arguments):
        return True
    returned = [each for each in schema.returns if "Tensor" in str(each.type)]
    return bool(returned) and not any(each.alias_info for each in returned)


def _is_captured() -> bool:
    """Return True if kernels become a part of a CUDA graph, whose replay would compute other values."""
    return bool(torch.cuda.is_current_stream_capturing())


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors_in(each)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    return [_map(function, each) for each in value] if isinstance(value, list | tuple) else function(value)


def _copy(value: Any) -> Any:
    return on_host(value).clone() if isinstance(value, torch.Tensor) else value


def _as_tensors(args: tuple[Any, ...], positions: list[int]) -> tuple[Any, ...]:
    """Replace numbers where a kernel needs tensors by tensors that change the type of its result as little."""
    order = [torch.bool, torch.int64, torch.get_default_dtype(), torch.complex64]
    types = [each.dtype for each in args if isinstance(each, torch.Tensor)]

    def rank(dtype: torch.dtype) -> int:
        return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype is not torch.bool)

    def convert(number: Any) -> torch.Tensor:
        own = order[_NUMBERS.index(type(number))]
        best = max(types, key=rank, default=own)
        return torch.scalar_tensor(number, dtype=best if rank(best) >= rank(own) else own, device="cpu")

    return tuple(convert(a) if i in positions and isinstance(a, _NUMBERS) else a for i, a in enumerate(args))
