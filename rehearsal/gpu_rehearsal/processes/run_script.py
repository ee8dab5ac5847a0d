"""The processes of rehearsals, which `processes` starts as `python -P -m ...run_script CHANNEL`.

The first process imports torch once for all scripts:

1. Replace process groups and launchers (`fake_ranks`). A launcher then runs its script in its own process.
2. Skip work that has no effect on GPU memory: writes to large tensors of the host, and autotuning.
3. Replace the functions that read values from the GPU (`device_values`).

It forks a process for each script, which sets the environment variables of the rank, runs the script, and records each
optimizer step (`step_recorder`).
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gpu_rehearsal.adapters import REHEARSAL, install_adapters
from gpu_rehearsal.device import set_card
from gpu_rehearsal.errors import CannotRehearse
from gpu_rehearsal.processes.commands import LAUNCHERS, program_of, script_of, without_python
from gpu_rehearsal.processes.fake_ranks import FakeRanks, replace_simple_launcher
from gpu_rehearsal.processes.libraries import compile_each_layer_once, sample_one_token, stand_in_for_apex
from gpu_rehearsal.processes.server import end_with_parent
from gpu_rehearsal.processes.together import fork_ranks
from gpu_rehearsal.recording.steps import StepRecorder, flush
from gpu_rehearsal.replacing import after_import
from gpu_rehearsal.report.record import NEEDS_OTHERS
from gpu_rehearsal.settings import RankSettings
from gpu_rehearsal.values.device_values import DeviceValues
from gpu_rehearsal.values.known import LARGE

SHARED = "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"
"""Modules that most scripts import. Libraries are not among them: many of them use CUDA, which forbids to fork."""


def serve(channel_number: str) -> None:
    """Fork a process for each request of the channel. Answer with its ID and, when it has ended, with its status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(channel_number))
    for name in SHARED:
        import_module(name)
    fake_ranks, values = replace_functions()
    gc.collect()
    gc.freeze()  # so that collections take as long as if a script had not imported these modules
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    cpu_s = time.process_time()
    while files := socket.recv_fds(channel, 64, 3)[1]:
        with open(files[0]) as file:
            request = json.load(file)
        if (process := os.fork()) == 0:
            channel.close()
            for at, output in enumerate(files[1:], 1):
                os.dup2(output, at)
                os.close(output)
            main(fake_ranks, values, **request)
        for output in files[1:]:
            os.close(output)
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(process, process)
        channel.send(str(process).encode())
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        with suppress(ProcessLookupError):  # end what the script has started, while no other process can have this ID
            os.killpg(process, signal.SIGKILL)
        _, status, usage = os.wait4(process, 0)
        answer = {"status": os.waitstatus_to_exitcode(status), "cpu_s": cpu_s + usage.ru_utime + usage.ru_stime}
        channel.send(json.dumps(answer).encode())
        cpu_s = 0


def main(
    fake_ranks: FakeRanks, values: DeviceValues, *, environ: Mapping[str, str], record: str,
    given: Mapping[str, Any], command: Sequence[str],
) -> NoReturn:  # fmt: skip
    """In a forked process, run the command, write its record into a folder, and end with the exit status."""
    os.setpgid(0, 0)
    end_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ, VLLM_CACHE_ROOT=f"{record}/vllm")
    folder, settings = Path(record), RankSettings(**given)
    # Python frees tensors in cycles when it collects all garbage, whose time would depend on the compiler's cache
    gc.set_threshold(*gc.get_threshold()[:2], 10_000)
    gc.collect()  # then count new objects from 0
    if program_of(command).startswith(("accelerate", "trl")):
        replace_simple_launcher(run)
    recorder = StepRecorder(folder / str(settings.rank), settings)
    REHEARSAL.record, REHEARSAL.trial = recorder.write, recorder.trial
    if settings.without_data:
        REHEARSAL.folder_without_data = folder / "output"
        REHEARSAL.folder_without_data.mkdir()

    def start_ranks(ranks: int) -> tuple[int, Sequence[int]]:
        """Return the rank of this process, and the ranks that run."""
        memory, rank = settings.memory_of_rank(ranks), settings.rank
        set_card(memory=memory["usable_bytes"], devices=settings.devices_of(ranks))
        values.running = running = settings.running(ranks)
        if len(running) > 1:
            rank, after_last_step = fork_ranks(running, folder, command)
            recorder.move_to(folder / str(rank), after_last_step)
        recorder.write("process", memory)
        if rank == settings.apart:
            guesses.kept, guesses.decides_apart = [], True
        return rank, running

    guesses, values.skew = values.guesses, settings.skew
    guesses.kept, guesses.fixed, guesses.not_finite = settings.kept, settings.fixed, settings.not_finite
    guesses.largest = settings.largest
    guesses.on_read, guesses.on_routing = recorder.has_read, recorder.routes
    guesses.on_decision, guesses.follows = recorder.has_decided, settings.follows
    values.alone = settings.together is None
    fake_ranks.on_group = lambda members: recorder.write("group", {"ranks": [*members]})
    fake_ranks.begin(settings.rank, settings.ranks, start_ranks, folder / "store")
    _run_recorded(recorder, command)


def replace_functions() -> tuple[FakeRanks, DeviceValues]:
    """Replace the functions of torch that a null device does not support."""
    fake_ranks, values = FakeRanks(run), DeviceValues()
    fake_ranks.install()
    torch.compiler.config.force_disable_caches = True  # peaks depend on Inductor's cache
    _skip_autotuning()
    _skip_writes_on_host()
    after_import("transformers.modeling_utils", _build_models_without_weights)
    after_import("megatron.core.utils", stand_in_for_apex)
    after_import("vllm.envs", compile_each_layer_once)
    after_import("vllm.v1.worker.gpu.async_utils", sample_one_token)
    values.install()
    install_adapters()
    return fake_ranks, values


def _run_recorded(recorder: StepRecorder, command: Sequence[str]) -> NoReturn:
    """Run the command while its steps are recorded, and end this process with its exit status."""
    status = 0
    try:
        with recorder:
            run(command)
    except (CannotRehearse, KeyboardInterrupt, torch.OutOfMemoryError):  # the verdict has the message
        status = 1
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001
        frames = error.__traceback__
        while frames and frames.tb_next and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            frames = frames.tb_next
        if NEEDS_OTHERS not in str(error):
            traceback.print_exception(error.with_traceback(frames))  # without the frames of this module
        status = 1
    _exit(status)


def _exit(status: int) -> NoReturn:
    """End the process like Python does, but skip C++ destructors, because some of them abort if no kernel has run."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush()
    os._exit(status)


def _skip_writes_on_host() -> None:
    """Do not write large weights and gradients on the host, because pages that are not written take no memory.

    They are not initialized. Pinning and conversions allocate but do not copy. Offloaded gradients are not accumulated
    or scaled, and optimizers skip large weights.
    """
    pin, hidden = torch.Tensor.pin_memory, []

    def is_large(tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.numel() >= LARGE

    def is_offloaded(tensor: torch.Tensor) -> bool:
        return is_large(tensor) and (hasattr(tensor, "_local_tensor") or tensor.is_pinned())

    def pinned(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty_like(tensor, pin_memory=True) if is_large(tensor) else pin(tensor, *args, **kwargs)

    def skip(where: Any, name: str, applies: Callable[[torch.Tensor], bool]) -> None:
        change = getattr(where, name)
        setattr(where, name, lambda tensor, *args, **kw: tensor if applies(tensor) else change(tensor, *args, **kw))

    def hide(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for weight in (each for group in optimizer.param_groups for each in group["params"] if is_large(each)):
            hidden.append((weight, weight.grad))
            weight.grad = None

    def show(*_: object) -> None:
        for weight, gradient in hidden:
            weight.grad = gradient
        hidden.clear()

    def convert_without_copy(change: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(change)
        def convert(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if type(tensor) is torch.nn.Parameter and is_large(tensor):
                example = change(tensor.data.flatten()[:0], *args, **kwargs)
                if example.device == tensor.device and example.dtype != tensor.dtype:
                    return torch.empty_like(tensor, dtype=example.dtype)
            return change(tensor, *args, **kwargs)  # type: ignore[no-any-return]

        return convert

    for name in "to", "float", "half", "bfloat16":
        setattr(torch.Tensor, name, convert_without_copy(getattr(torch.Tensor, name)))
    torch.Tensor.pin_memory = pinned  # type: ignore[method-assign,assignment]
    for where, name in (torch.Tensor, "normal_"), (torch.Tensor, "uniform_"), (torch.nn.init, "_no_grad_trunc_normal_"):
        skip(where, name, is_large)
    for name in "mul_", "__imul__", "__iadd__":
        skip(torch.Tensor, name, is_offloaded)
    register_optimizer_step_pre_hook(torch.compiler.disable(hide))
    register_optimizer_step_post_hook(torch.compiler.disable(show))


def _skip_autotuning() -> None:
    """Let autotuners use the first candidate, and let Inductor pad matrices untried."""

    def take_first(owner: str, method: str, position: int, module: Any) -> None:
        choose = getattr(getattr(module, owner), method)

        def take(*args: Any, **kwargs: Any) -> Any:
            first = [list(each or ())[:1] for each in args[position : position + 1]]
            return choose(*args[:position], *first, *args[position + 1 :], **kwargs)

        setattr(getattr(module, owner), method, take)

    after_import(
        "torch._inductor.fx_passes.pad_mm", lambda module: setattr(module, "get_cached_should_pad", lambda _: True)
    )
    after_import("triton.runtime.autotuner", functools.partial(take_first, "Autotuner", "__init__", 3))
    after_import(
        "torch._inductor.select_algorithm", functools.partial(take_first, "AlgorithmSelectorCache", "__call__", 2)
    )


_ENDED: list[dict[str, Any]] = []
"""The globals of scripts that have ended, whose optimizers the record describes."""


def run(command: Sequence[str]) -> None:
    """Run a script, `-m module` or a Python program in this process."""
    command = without_python(command)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        if command[1] in LAUNCHERS:  # runpy would run a copy of the module, in which no function is replaced
            import_module(command[1]).main()
            return
        sys.path.insert(0, os.getcwd())
        _ENDED.append(runpy.run_module(command[1], run_name="__main__", alter_sys=True))
        return
    script = script_of(command[0]) or command[0]
    sys.argv = [script, *command[1:]]
    sys.path.insert(0, str(Path(script).resolve().parent))
    _ENDED.append(runpy.run_path(script, run_name="__main__"))


MODEL_KEYS = ("dtype", "torch_dtype", "attn_implementation")
"""Arguments of `from_pretrained` that also apply to a model without weights."""


def _build_models_without_weights(transformers: Any) -> None:
    """Let `from_pretrained` build a model from its config if this machine does not have the weights."""
    models = transformers.PreTrainedModel
    load = models.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, /, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        try:
            return load(cls, name, *args, config=config, **{**kwargs, "local_files_only": True})
        except OSError:
            if "quantization_config" in kwargs:
                return quantized(cls, name, config, kwargs)
        arguments = {key: kwargs.pop(key) for key in MODEL_KEYS if kwargs.get(key) not in (None, "auto")}
        device_map, max_memory = kwargs.pop("device_map", None), kwargs.pop("max_memory", None)
        if config is None or isinstance(config, str | os.PathLike):
            config, _ = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **kwargs)
        print(f"rehearse: this machine has no weights of {name}; the model is built from its config", file=sys.stderr)
        config.name_or_path = str(name)
        model = cls._from_config(config, **arguments).eval()
        return model if device_map is None else _dispatch(model, device_map, max_memory)

    def quantized(cls: Any, name: Any, config: Any, kwargs: dict[str, Any]) -> Any:
        """Save weights of zeros, and load these, because a quantizer replaces layers only while it loads files."""
        built = from_pretrained(cls, name, config=config, **{key: kwargs[key] for key in MODEL_KEYS if key in kwargs})
        with tempfile.TemporaryDirectory() as folder:
            built.save_pretrained(folder)
            del built
            return load(cls, folder, **kwargs)

    models.from_pretrained = classmethod(from_pretrained)


def _dispatch(model: Any, device_map: Any, max_memory: Any) -> Any:
    """Distribute the layers over the devices, as transformers does."""
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    if device_map in ("auto", "balanced"):
        whole = model._no_split_modules
        max_memory = get_balanced_memory(model, max_memory, no_split_module_classes=whole)
        device_map = infer_auto_device_map(model, max_memory=max_memory, no_split_module_classes=whole)
    if not isinstance(device_map, dict):
        return model.to(device_map)
    return dispatch_model(model, device_map=device_map, skip_keys=model._skip_keys_device_placement)


if __name__ == "__main__":
    serve(*sys.argv[1:])
