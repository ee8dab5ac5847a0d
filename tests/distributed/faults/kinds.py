"""The ways in which running out of memory reaches us."""

from collections.abc import Callable

import torch
from torch._inductor.exc import InductorError


def without_a_type(text: str) -> Callable[[str], Exception]:
    """What backends raise that have no type for it."""

    def build(_: str) -> Exception:
        return RuntimeError(text)

    return build


def as_dtensor_does(what: str) -> Exception:
    """What DTensor makes of an error in an operation."""
    error = RuntimeError(f"{what}\n\nSharding propagation failed for aten.mm.default")
    error.__cause__ = torch.OutOfMemoryError(what)
    return error


def as_torch_compile_does(what: str) -> Exception:
    return InductorError(RuntimeError("Triton Error [CUDA]: out of memory"), None)


KINDS: dict[str, Callable[[str], Exception]] = {
    "a type of torch's": torch.OutOfMemoryError,
    "driver": without_a_type("CUDA driver error: out of memory"),
    "triton": without_a_type("Triton Error [CUDA]: out of memory"),
    "hip": without_a_type("HIP error: out of memory"),
    "xpu": without_a_type("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    "npu": without_a_type("NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity)"),
    "cublas handle": without_a_type("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    "cufft": without_a_type("cuFFT error: CUFFT_ALLOC_FAILED"),
    "host": without_a_type("DefaultCPUAllocator: not enough memory: you tried to allocate 911360 bytes."),
    "dtensor": as_dtensor_does,
    "torch.compile": as_torch_compile_does,
}
