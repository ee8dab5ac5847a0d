"""The library is built once by any number of processes; if a build is impossible, one line gives the reason."""

import ctypes
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from gpu_rehearsal.device import environment
from gpu_rehearsal.device.build import LIBRARY, NullCudaError, build

BUILDING = sys.modules[build.__module__]
run_once = cache(BUILDING._run)

ASK = """
import torch
card = torch.cuda.get_device_properties(1)
print(torch.cuda.is_available(), torch.cuda.device_count(), card.name, card.major, card.minor, card.total_memory)
"""


def test_concurrent_builds_end_with_one_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = [sys.executable, "-c", "from gpu_rehearsal.device import build; print(build())"]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {builder.communicate(timeout=240)[0].strip() for builder in builders}
    assert {builder.returncode for builder in builders} == {0}
    (library,) = map(Path, printed)
    assert list(tmp_path.rglob(LIBRARY)) == [library]
    assert list(library.parent.parent.iterdir()) == [library.parent]


def test_command_prints_variables_that_give_a_program_null_devices() -> None:
    ask = [sys.executable, "-m", "gpu_rehearsal.device", "24GiB"]
    printed = subprocess.run(ask, capture_output=True, text=True, timeout=120, check=True).stdout.split()
    there = {**os.environ, **dict(each.split("=", 1) for each in printed)}
    there |= {"NULL_CUDA_CAPABILITY": "8.6", "NULL_CUDA_DEVICES": "3", "NULL_CUDA_NAME": "Acard"}
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=120, env=there)
    assert (done.returncode, done.stdout) == (0, f"True 3 Acard 8 6 {24 * 2**30}\n"), done.stderr


def test_card_name_contains_its_capability_so_that_compile_caches_stay_separate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, name = ctypes.CDLL(str(build())), ctypes.create_string_buffer(256)
    names = []
    for version in ("7.5", "9.0"):
        card = environment(memory="80GB", capability=version)
        assert card["NULL_CUDA_MEMORY"] == str(80 * 10**9)
        monkeypatch.setenv("NULL_CUDA_CAPABILITY", card["NULL_CUDA_CAPABILITY"])
        library.null_cuda_read_environment()
        library.cuDeviceGetName(name, 256, 0)
        names.append(name.value)
    assert names == [b"null device 7.5", b"null device 9.0"]


@pytest.mark.parametrize(
    ("version", "built_for"),
    [("__version__, cuda = '2.99.0+cpu', None", "the CPU only"), ("__version__, cuda = '2.99.0', '12.8'", "CUDA 12.8")],
)
def test_command_refuses_a_torch_that_is_not_built_for_cuda_13(tmp_path: Path, version: str, built_for: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(version)
    command = [sys.executable, "-m", "gpu_rehearsal.device", "80GB"]
    there = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=there)
    assert (done.returncode, done.stdout) == (1, "")
    message = done.stderr.splitlines()[-1].partition("NullCudaError: ")[2]
    assert message.startswith("a null device needs a torch built for CUDA 13; torch 2.99.0")
    assert message.endswith(f" is built for {built_for}")


def test_unsupported_platform_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    with pytest.raises(NullCudaError, match=r"needs Linux on x86_64 or aarch64; this is Darwin arm64"):
        build()


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a separate cache and a small build, and import torch only once, which takes the longest."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(BUILDING, "_required", lambda *_: set())
    monkeypatch.setattr(BUILDING, "_run", run_once)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CC": "", "PATH": ""}, r"needs a C compiler \(cc and nm\): install gcc or build-essential$"),
        ({"CC": "/nope/gcc"}, "needs a C compiler"),
        ({"CC": "cc '"}, "building the null device failed: "),
        ({"CC": "false"}, "status 1; set CC to a working C compiler$"),
        ({"XDG_CACHE_HOME": "file"}, r"cannot build in .*file/gpu_rehearsal.*: set XDG_CACHE_HOME$"),
        # LD_PRELOAD would split these paths
        ({"XDG_CACHE_HOME": "with space"}, "the path of the cache has a space or a colon"),
        ({"XDG_CACHE_HOME": "co:lon"}, "the path of the cache has a space or a colon"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_impossible_build_is_refused_with_a_remedy(
    variables: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").touch()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NullCudaError, match=reason):
        build()


@pytest.mark.usefixtures("quick")
def test_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc -O0")
    assert build().stat().st_size > 0


@pytest.mark.smoke
@pytest.mark.usefixtures("quick")
def test_damaged_library_is_rebuilt() -> None:
    library = build()
    library.write_bytes(b"")
    assert build().stat().st_size > 0
    library.unlink()
    assert build().stat().st_size > 0
