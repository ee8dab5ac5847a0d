"""Compile and cache the library of null devices: the C files, and stubs for the other functions of CUDA.

The library has every function of CUDA's libraries that are installed beside torch, because a script may load other
libraries that call them. Stubs for further functions are compiled when a script loads such a library (extensions.c).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from gpu_rehearsal.errors import NullCudaError

PROGRAM = Path(__file__).with_name("nvidia_smi.c")
SOURCES = sorted(each for each in Path(__file__).parent.glob("*.[ch]") if each != PROGRAM)
LIBRARY = "libcuda.so.1"
_CUDA_FUNCTIONS = re.compile(r"__cuda[A-Z]|cu[a-z]*[A-Z]|nccl[A-Z]|nvml[A-Z]|nvshmem")
"""Names of functions of CUDA and its libraries. NVRTC, a compiler, works without a GPU and has no stubs."""

_REPLACED = re.compile(r"lib(cudart|cublas|cublasLt|cudnn|cufft|cusolver|cusparse|nccl)\.so")
"""Libraries that a null device replaces, also if a script loads them by their path (extensions.c)."""

_SIZES = {
    r"cusolverDn[SDCZ](geqrf|getrf|potrf)_bufferSize": (5,),
    r"cusolverDn[SDCZ]gesvd_bufferSize": (3,),
    r"cusolverDn[SDCZ]gesvdj_bufferSize": (12,),
    r"cusolverDn[SDCZ]gesvdjBatched_bufferSize": (11,),
    r"cusolverDn[SDCZ]gesvdaStridedBatched_bufferSize": (16,),
    r"cusolverDn[SDCZ](syevd|heevd|syevjBatched|heevjBatched|orgqr|ungqr)_bufferSize": (7,),
    r"cusolverDn[SDCZ](ormqr|unmqr)_bufferSize": (11,),
    r"cusolverDn[SDCZ]sytrf_bufferSize": (4,),
    r"cusolverDnXgeev_bufferSize": (17, 18),
    r"cusolverDnXgeqrf_bufferSize": (10, 11),
    r"cusolverDnXpotrf_bufferSize": (8, 9),
    r"cusolverDnX(syevd|syevBatched|sytrs)_bufferSize": (11, 12),
    r"cufftXtMakePlanMany": (12,),
    r"cusparseSp(MM|SM)_bufferSize|cusparseSDDMM_bufferSize": (10,),
    r"cusparseSp(MV|SV)_bufferSize": (9,),
    r"cusparseSpGEMM_(workEstimation|compute)": (11,),
    r"cusparseSpMatGetSize": (1, 2, 3),
    r"cusparse.csrgeam2_bufferSizeExt": (19,),
    r"cusparseX(coosort|csrsort)_bufferSizeExt": (6,),
    r"cudnnDropoutGetStatesSize": (1,),
    r"cudnnGetCTCLossWorkspaceSize": (8,),
    r"cudnnGetCTCLossWorkspaceSize_v8": (5,),
    r"cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize": (8,),
    r"cudnnGetBatchNormalizationBackwardExWorkspaceSize": (10,),
    r"cudnnGetBatchNormalizationTrainingExReserveSpaceSize": (5,),
}
"""Functions that return sizes, and the indices of the arguments that point to a size."""
_UNSUPPORTED = r"cu(solver|sparse|dnn)\w*([bB]ufferSize|SpaceSize|SpaceSizes|GetWorkspace|CompressedSize2)"
"""Other functions that return sizes. They fail, because otherwise the caller would read an uninitialized size."""

_VERSION_MACROS = ("CUDNN_MAJOR", "CUDNN_MINOR", "CUDNN_PATCH", "NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH")


def build() -> Path:
    """Build the library unless the cache contains it, and return its path.

    Each build uses a folder of its own, which is then renamed. If several processes build at once, the first one wins.
    """
    torch_folder, version, cuda = _torch()
    sources_hash = hashlib.sha256(b"".join(path.read_bytes() for path in (*SOURCES, PROGRAM, Path(__file__))))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "gpu_rehearsal"
    if re.search(r"[\s:]", str(cache)):  # LD_PRELOAD splits its value at these
        raise NullCudaError(
            f"the path of the cache has a space or a colon ({cache}): set XDG_CACHE_HOME to another path"
        )
    library = cache / f"null_cuda-{platform.machine()}-{version}-{sources_hash.hexdigest()[:12]}" / LIBRARY
    if library.parent.exists():  # renamed into place with all its files
        if library.exists() and library.stat().st_size:
            return library
        shutil.rmtree(library.parent, ignore_errors=True)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=cache, ignore_cleanup_errors=True) as folder:
            _compile(Path(folder), torch_folder, cuda)
            Path(folder).rename(library.parent)
    except OSError as error:
        if not library.exists():  # otherwise another process was first
            raise NullCudaError(f"cannot build in {cache} ({error.strerror}): set XDG_CACHE_HOME") from None
    return library


def _torch() -> tuple[Path, str, str]:
    """Return torch's folder, its version and its CUDA version, without importing it."""
    found = find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise NullCudaError("a null device needs torch, which is not installed")
    folder = Path(found.submodule_search_locations[0])
    version = runpy.run_path(str(folder / "version.py"))
    here = f"{platform.system()} {platform.machine()}"
    if here not in ("Linux x86_64", "Linux aarch64"):
        raise NullCudaError(f"a null device needs Linux on x86_64 or aarch64; this is {here}")
    if version["cuda"] is None or int(version["cuda"].split(".")[0]) != 13:
        built_for = f"CUDA {version['cuda']}" if version["cuda"] else "the CPU only"
        raise NullCudaError(
            f"a null device needs a torch built for CUDA 13; torch {version['__version__']} is built for {built_for}"
        )
    return folder, version["__version__"], version["cuda"]


def build_stubs() -> None:
    """Compile stubs of functions into a library beside LIBRARY, which calls this in a process of its own.

    The arguments of the process are the path of the new library and the functions.
    """
    path, names = Path(sys.argv[1]), {*sys.argv[2:]}
    try:
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=path.parents[1]) as folder:
            source, library = Path(folder) / "stubs.c", Path(folder) / path.name
            source.write_text(_stubs(names))
            _link(library, *_compiler(), str(source))
            library.rename(path)
    except (NullCudaError, OSError) as error:
        sys.exit(f"null device: {error}")


_NO_COMPILER = "a null device needs a C compiler (cc and nm): install gcc or build-essential"


def _compiler() -> list[str]:
    compiler = (os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or "").split()
    if not compiler or not shutil.which(compiler[0]):
        raise NullCudaError(_NO_COMPILER)
    return compiler


def _link(library: Path, *command: str) -> None:
    _run(
        *command, "-shared", "-fPIC", "-O2", "-fno-builtin", "-w", "-pthread", "-fvisibility=hidden",
        f"-I{Path(__file__).parent}", "-o", str(library), "-ldl", remedy="; set CC to a working C compiler",
    )  # fmt: skip


def _compile(folder: Path, torch_folder: Path, cuda: str) -> None:
    compiler, nm = _compiler(), shutil.which("nm")
    if not nm:
        raise NullCudaError(_NO_COMPILER)
    major, minor = cuda.split(".")[:2]
    ask = (
        "import torch; print(*torch._C._cudnn.getCompileVersion(), *torch.cuda.nccl.version(), "
        "torch._C._cuda_getArchFlags())"
    )
    found = _run(sys.executable, "-c", ask).split()
    codes = ",".join(flag.removeprefix("sm_") for flag in found if re.fullmatch(r"sm_\d+", flag))
    versions = {"CUDA": f"{major}0{minor}0", "CODES": codes, **dict(zip(_VERSION_MACROS, found, strict=False))}
    (folder / "stubs.c").write_text(_stubs(_required(nm, torch_folder) - _implemented()))
    _link(
        folder / LIBRARY, *compiler, *(f"-D{name}={value}" for name, value in versions.items()),
        *(str(path) for path in SOURCES if path.suffix == ".c"), str(folder / "stubs.c"), f"-Wl,-soname,{LIBRARY}",
    )  # fmt: skip
    (folder / "libnvidia-ml.so.1").symlink_to(LIBRARY)  # torch counts devices through NVML
    _run(*compiler, "-w", f"-I{PROGRAM.parent}", str(PROGRAM), str(folder / LIBRARY), "-o", str(folder / "nvidia-smi"))


def _required(nm: str, torch_folder: Path) -> set[str]:
    """Return the functions of CUDA's libraries, and those that torch and Triton need (undefined or found by name)."""
    libraries = [str(path) for path in sorted((torch_folder / "lib").glob("lib*.so*"))]
    undefined = _run(nm, "-D", "--undefined-only", *libraries).split()
    replaced = [str(path) for path in torch_folder.parent.glob("nvidia/*/lib/lib*.so*") if _REPLACED.match(path.name)]
    if replaced:
        undefined += _run(nm, "-D", "--defined-only", *replaced).split()
    by_name = (torch_folder / "lib" / "libc10_cuda.so").read_bytes().split(b"\0")
    names = {name.split("@")[0] for name in undefined} | {name.decode() for name in by_name if name.isascii()}
    triton = find_spec("triton")
    if triton and triton.submodule_search_locations:
        for source in Path(triton.submodule_search_locations[0]).glob("backends/nvidia/driver.c"):
            names |= set(re.findall(r"\bcu[A-Z]\w+(?=\s*[()])", source.read_text()))
    return {name for name in names if _CUDA_FUNCTIONS.match(name) and name.isidentifier()}


def _implemented() -> set[str]:
    """Return the functions that the C files define."""
    text = "\n".join(path.read_text() for path in SOURCES)
    return set(re.findall(r"^(?:API [^(]*?\W|[A-Z_]+\()(\w+)[(),]", text, re.MULTILINE))


def _stubs(names: set[str]) -> str:
    """Return C code of functions that do nothing and succeed. Created objects and strings are not null, sizes are 0."""
    lines = ['#include "null.h"']
    for name in sorted(names):
        sizes = next((at for pattern, at in _SIZES.items() if re.fullmatch(pattern, name)), None)
        if sizes:
            kind = "int" if re.match(r"cusolverDn[SDCZ]", name) else "size_t"
            arguments = ", ".join(f"{kind} *{'out' if at in sizes else 'a'}{at}" for at in range(max(sizes) + 1))
            outputs = ", ".join(f"*out{at} = 0" for at in sizes)
            used = "" if name.startswith("cudnn") else "null_cuda_solvers = 1, "
            lines.append(f"API int {name}({arguments}) {{ return {used}{outputs}, SUCCESS; }}")
        elif re.match(_UNSUPPORTED, name):
            lines.append(f"API int {name}(void) {{ return NOT_SUPPORTED; }}")
        elif name.endswith(("String", "LastError")):
            lines.append(f'API const char *{name}(void) {{ return "not available on a null device"; }}')
        elif re.match(r"(cublas|cudnn|cusolver|cusparse|cuda|cu(?=[A-Z]))\w*Create", name):
            lines.append(f"API int {name}(void **out) {{ return *out = null_cuda_handle(), SUCCESS; }}")
        else:
            lines.append(f"API int {name}(void) {{ return {'3' if name.startswith('nvml') else 'SUCCESS'}; }}")
    return "\n".join(lines) + "\n"


def _run(*command: str, remedy: str = "") -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"status {result.returncode}"]
        first = next((line for line in lines if re.search("error|fail|No space", line)), lines[-1])
        raise NullCudaError(f"building the null device failed: {first.strip()}{remedy}")
    return result.stdout
