"""Libraries that a script loads find every function of CUDA, also those that torch does not call."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_rehearsal.device import build, used_memory
from tests.processes import on_null_device

MIB = 2**20


def compiled(library: Path, source: str, *flags: str) -> Path:
    """Compile C code into a library."""
    command = ["cc", "-w", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), *flags]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    return library


CALLS = "int cuTensorMapEncodeTiled(void *, int); int cudaOfALater%sVersion(int); int nvmlOther%s(void);"
CALLS += (
    "int probe(void) { return cuTensorMapEncodeTiled(0, 1) * 100 + cudaOfALater%sVersion(1) * 10 + nvmlOther%s(); }"
)


@pytest.mark.smoke
@on_null_device()
def test_extension_may_call_functions_that_torch_does_not_call(tmp_path: Path) -> None:
    name = f"T{os.getpid()}"
    library = compiled(tmp_path / "extension.so", CALLS % ((name,) * 4))
    before = set(build().parent.iterdir())
    assert ctypes.CDLL(str(library)).probe() == 3  # "not supported" of NVML
    stubs = set(build().parent.iterdir()) - before
    assert len(stubs) == 1
    copied = shutil.copy(library, tmp_path / "copy.so")
    os.environ["CC"] = "false"  # the stubs are in the cache
    child = [sys.executable, "-c", f"import ctypes; print(ctypes.CDLL({str(copied)!r}).probe())"]
    assert subprocess.check_output(child, text=True, timeout=60) == "3\n"
    stubs.pop().unlink()


@on_null_device()
def test_extension_without_a_compiler_is_refused_by_the_names_of_its_functions(tmp_path: Path) -> None:
    library = compiled(tmp_path / "extension.so", "int cuOnlyHere(void); int probe(void) { return cuOnlyHere(); }")
    load = f"import ctypes; ctypes.CDLL({str(library)!r})"
    ended = subprocess.run(
        [sys.executable, "-c", load], env={**os.environ, "CC": "false"}, capture_output=True, text=True
    )
    assert f"null device: {library} cannot be loaded, because these functions have no stubs: cuOnlyHere" in ended.stderr
    assert "set CC to a working C compiler" in ended.stderr


@pytest.mark.parametrize("name", ["libcudart.so.13", "libcudart.faf08d9a.so.13", "libcudart-c64a25f3.so.12.3.101"])
@on_null_device()
def test_cuda_library_that_is_loaded_by_its_path_is_the_null_device(tmp_path: Path, name: str) -> None:
    """vLLM looks up the path of libcudart in the process's maps; wheels have copies with a hash in their name."""
    torch.empty(MIB, device="cuda")
    maps = Path("/proc/self/maps").read_text().split()
    path = shutil.copy(next(word for word in maps if "libcudart.so" in word), tmp_path / name)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert ctypes.CDLL(str(path)).cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    assert total.value - free.value == used_memory() > 0


@on_null_device()
def test_library_is_found_in_the_search_path_of_the_library_that_loads_it(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    compiled(tmp_path / "inner" / "libinner.so", "int x;")
    source = '#include <dlfcn.h>\nint probe(void) { return dlopen("libinner.so", RTLD_NOW) != 0; }'
    outer = compiled(tmp_path / "outer.so", source, "-Wl,-rpath,$ORIGIN/inner", "-Wl,--enable-new-dtags")
    assert ctypes.CDLL(str(outer)).probe() == 1


@pytest.mark.parametrize("ask", ["cuGetProcAddress_v2", "cudaGetDriverEntryPoint", "cudaGetDriverEntryPointByVersion"])
@on_null_device()
def test_driver_functions_that_are_looked_up_by_name_use_the_card(ask: str) -> None:
    cuda, allocate, memory, status = ctypes.CDLL(None), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(9)
    version = [] if ask == "cudaGetDriverEntryPoint" else [13000]
    flags = ctypes.c_uint64(0)
    assert getattr(cuda, ask)(b"cuMemAlloc", ctypes.byref(allocate), *version, flags, ctypes.byref(status)) == 0
    before = used_memory()
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)(allocate.value)
    assert (status.value, call(ctypes.addressof(memory), 6 * MIB)) == (0, 0)
    assert used_memory() - before == 6 * MIB
    assert cuda.cuMemFree_v2(memory) == 0
    assert used_memory() == before


@on_null_device()
def test_memory_of_another_process_is_opened_without_counting_it_twice() -> None:
    cuda, handle = ctypes.CDLL(None), (ctypes.c_char * 64)()
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert cuda.cudaIpcGetMemHandle(handle, ctypes.c_void_p(held.data_ptr())) == 0
    opens = (
        "import ctypes, sys; from gpu_rehearsal.device import used_memory\n"
        "cuda, at = ctypes.CDLL(None), ctypes.c_void_p()\n"
        "class Handle(ctypes.Structure): _fields_ = [('bytes', ctypes.c_char * 64)]\n"
        "handle = Handle.from_buffer_copy(bytes.fromhex(sys.argv[1]))\n"
        "assert cuda.cudaIpcOpenMemHandle(ctypes.byref(at), handle, 1) == 0\n"
        f"print(ctypes.string_at(at.value + {64 * MIB - 2}, 1), used_memory(), cuda.cudaIpcCloseMemHandle(at))"
    )
    child = [sys.executable, "-c", opens, bytes(handle.raw).hex()]
    assert subprocess.check_output(child, text=True, timeout=60) == "b'\\x00' 0 0\n"


@on_null_device()
def test_nvml_describes_the_card_to_vllm() -> None:
    nvml, card, major, minor = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(card)) == 0
    assert nvml.nvmlDeviceGetCudaComputeCapability(card, ctypes.byref(major), ctypes.byref(minor)) == 0
    assert (major.value, minor.value) == torch.cuda.get_device_capability()
    text, found = ctypes.create_string_buffer(96), ctypes.c_void_p()
    assert nvml.nvmlDeviceGetUUID(card, text, 96) == 0
    assert nvml.nvmlDeviceGetHandleByUUID(text, ctypes.byref(found)) == 0
    assert found.value == card.value
