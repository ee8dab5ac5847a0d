"""`torch.compile` on tensors without data, without a GPU and without a compiler; all of torch's insides that it takes.

Dynamo, AOTAutograd and Inductor run as in training, up to the Python module that Inductor writes around its kernels.
That module allocates, reuses and frees every buffer of a compiled layer: it is Inductor's own memory plan. Here it runs
on fakes, with kernels that do nothing, and with allocations that dispatch modes see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch._dynamo
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._inductor import async_compile, cpp_builder, cpu_vec_isa, ir
from torch._inductor.codegen import cpp
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torchtune_adaptive.errors import PredictionError, Remedy
from torchtune_adaptive.patching import Member, replaced
from torchtune_adaptive.prediction.recorder import Recorder

KNOWN_VERSIONS = ((2, 11), (2, 12), (2, 13))
"""Versions of torch in whose sources the names below were looked up."""


@contextmanager
def without_kernels(device: torch.device, *, as_on_gpu: bool) -> Iterator[None]:
    """While open, what torch.compile compiles only allocates, on this device, and frees.

    Dynamo forgets what it has compiled before and after, and no cache on disk is read or written.
    """
    replacements = _replacements(device, as_on_gpu=as_on_gpu)
    _check_known(torch.__version__, replacements)
    torch._dynamo.reset()
    try:
        with (
            replaced(*replacements),
            inductor_config.patch(size_asserts=False, alignment_asserts=False, fx_graph_cache=False, compile_threads=1),
            functorch_config.patch(enable_autograd_cache=False),
            # past the limit of programs Dynamo would quietly be eager
            torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
        ):
            yield
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise PredictionError(f"the compiled step cannot be predicted ({reason})", Remedy.MEASURE) from error
    finally:
        torch._dynamo.reset()


def _replacements(device: torch.device, *, as_on_gpu: bool) -> list[Member]:
    guards = torch._C._dynamo.guards
    replacements: list[Member] = [
        (async_compile.AsyncCompile, "cpp_pybinding", _no_kernel),
        (guards, "_empty_strided_cpu", partial(_empty_strided, device)),
        (guards, "_reinterpret_tensor", _reinterpret_tensor),
        # Inductor asks a C++ compiler what it can do, also for kernels that nobody compiles
        (cpu_vec_isa, "valid_vec_isa_list", list),
        (cpp_builder, "get_cpp_compiler", lambda: "none"),
        # how exactly it sums depends on the size, and a program that asks for it would not be one for all sizes
        (cpp.CppKernel, "need_use_acc_helper", lambda *_: False),
    ]
    if as_on_gpu:
        # on a CPU Inductor keeps what is expensive to compute twice; on a GPU that is cheaper than to read it again
        replacements.append((ir, "is_cpu", lambda _: False))
    return replacements


def _check_known(version: str, replacements: Sequence[Member]) -> None:
    """Refuses a torch whose insides may be others: what it does not have would be predicted wrongly without a word."""
    missing = [name for where, name, _ in replacements if not hasattr(where, name)]
    if tuple(map(int, version.split(".")[:2])) not in KNOWN_VERSIONS or missing:
        known = ", ".join(".".join(map(str, each)) for each in KNOWN_VERSIONS)
        lacks = f", which lacks {', '.join(missing)}" if missing else ""
        raise PredictionError(
            f"predictions of compiled steps use internals of torch {known}; this is {version}{lacks}", Remedy.MEASURE
        )


class _NoKernel:
    """Stands for what Inductor would have had compiled. Its outputs are allocated by then."""

    def __call__(self, *args: object, **_: object) -> None:
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, Recorder) and mode.counter is not None:
                mode.counter.kernel(args)


def _no_kernel(*_: object, **__: object) -> _NoKernel:
    return _NoKernel()


def _empty_strided(device: torch.device, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Inductor's own goes past the dispatcher, where no mode sees it."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret_tensor(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset).detach()
