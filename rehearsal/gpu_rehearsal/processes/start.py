"""Run the command to rehearse in a process with null devices until it ends."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from gpu_rehearsal.device import environment
from gpu_rehearsal.errors import CannotRehearse
from gpu_rehearsal.formatting import count_of, ranks_named
from gpu_rehearsal.gpus import Gpu
from gpu_rehearsal.processes.commands import likely_ranks
from gpu_rehearsal.processes.server import execute
from gpu_rehearsal.progress import shown
from gpu_rehearsal.report.record import MOST_READS, NEEDS_OTHERS
from gpu_rehearsal.report.result import RehearsalResult
from gpu_rehearsal.settings import MOST_UNASKED, RankSettings

DEFAULTS = {
    "TORCH_CPP_LOG_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
}  # fmt: skip
"""Hide warnings of torch's execution trace. Let vLLM run its engine in the script's process, whose memory is counted,
and without kernels that are compiled at run time."""
_FIXED = {"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN", "TORCHINDUCTOR_MAX_AUTOTUNE_CONV_BACKENDS": "ATEN"}
"""Use ATen's kernels instead of comparing the time of several."""
_OF_OTHER_LAUNCH = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|CUDA_VISIBLE_DEVICES)"
    r"|TORCH_DISTRIBUTED_DEBUG"  # wraps process groups, which does not work with fake ones
)
"""Variables of an earlier launch, which may still be set in the shell."""
NO_ADAPTER = (
    "CannotRehearse: --without-data needs a script of a package whose adapter replaces the data, such as a recipe of "
    "torchtune-adaptive: rehearse this script with its data"
)


def rehearse_once(
    command: Sequence[str], gpu: Gpu, settings: RankSettings, output: IO[Any] | None = None
) -> RehearsalResult:
    """Run a command as one rank of many on null devices, and return the result.

    If the rank cannot run without the others, as in a pipeline, rehearse them together: all ranks or, if there are too
    many, those of the process group that needs them. The output of the command is copied to `output`, by default
    standard error. Raises CannotRehearse, or a NullCudaError if a null device cannot be built.
    """
    settings = settings._replace(memory=gpu.memory)
    likely = settings.ranks or likely_ranks(command, settings.rank)
    memory = settings.memory_of_rank(likely)
    device = environment(memory=memory["usable_bytes"], devices=settings.devices_of(likely), capability=gpu.capability)
    device["NULL_CUDA_NAME"] = f"NVIDIA {gpu.name.upper()} (null device)"  # scripts look for parts such as H100
    environ = script_environment({**DEFAULTS, **os.environ, **_FIXED, **device})
    again = ", again with other values" * (settings.kept is not None or settings.not_finite or bool(settings.largest))
    what = gpu.name + (f", {count_of(settings.ranks, 'rank')}" if settings.ranks else "") + again
    with tempfile.TemporaryDirectory() as folder, shown(what, Path(folder)):
        request = {"record": folder, "given": settings._asdict(), "command": command}
        ending = execute(request, environ, settings.timeout, output)
        found = RehearsalResult.read_ranks(Path(folder), **memory, gpu=gpu, **ending)
        if found.fits and len(found.reads) < MOST_READS - 1:  # the record is complete
            found.unread.extend(settings.fixed.keys() - found.places_read)
    if settings.without_data and not found.setting:
        found = replace(found, status=found.status or 1, message=NO_ADAPTER)
    if settings.together is None and NEEDS_OTHERS in str(found.end.get("error")):
        needed = list(found.end["needs_ranks"]) if found.ranks > MOST_UNASKED else []
        which = ranks_named(needed) if needed else "all ranks"
        print(f"rehearse: ranks send messages to each other, so {which} are rehearsed", file=sys.stderr)
        together = rehearse_once(command, gpu, settings._replace(together=needed), output)
        return replace(together, cpu_s=together.cpu_s + found.cpu_s)
    return found


def script_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of an earlier launch. Raise CannotRehearse for another CUDA allocator."""
    settings = variables.get("PYTORCH_ALLOC_CONF") or variables.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in variables or "cudaMallocAsync" in settings:
        raise CannotRehearse(
            "only torch's own caching allocator can be rehearsed: unset PYTORCH_NO_CUDA_MEMORY_CACHING, and remove "
            "backend:cudaMallocAsync from PYTORCH_ALLOC_CONF"
        )
    return {name: value for name, value in variables.items() if not _OF_OTHER_LAUNCH.fullmatch(name)}
