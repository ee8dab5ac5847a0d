"""Runs a script as one rank of many: python -P -m torchtune_adaptive.rehearse.run_script RECORD SETTINGS script args

1. This process becomes the rank: a launcher's variables, a process group that sends nothing (one_of_many.py).
2. What would only cost this machine time or memory is left out: random weights, offloaded copies, autotuning.
3. Numbers that the card would have computed are known or guessed when they are read (device_values.py).
4. The script runs, and each optimizer step is written down (step_writer.py). torchrun, `tune run` and `accelerate
   launch` are seen through: what they would start runs here.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torchtune_adaptive.null_cuda import set_card
from torchtune_adaptive.rehearsal_flag import REHEARSAL
from torchtune_adaptive.rehearse.device_values import LARGE, DeviceValues
from torchtune_adaptive.rehearse.fake_ranks import FakeRanks, replace, replace_simple_launcher, set_rank_variables
from torchtune_adaptive.rehearse.result import RECURRENT
from torchtune_adaptive.rehearse.start import (
    LAUNCHERS,
    ONE_MACHINE,
    CannotRehearse,
    RankSettings,
    launched,
    script_of,
    without_python,
)
from torchtune_adaptive.rehearse.step_recorder import StepRecorder, flush, innermost
from torchtune_adaptive.text import count_of

SILENT_S = 60


def main(record: str, asked: str, *command: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    settings = RankSettings(**json.loads(asked))
    writer = StepRecorder(Path(record), most_steps=settings.steps)

    def learn(ranks: int) -> None:
        share = settings.share(ranks)
        set_card(memory=share["usable_bytes"], devices=min(ranks, ONE_MACHINE))
        writer.write("share", share)

    REHEARSAL.on = True
    os.environ["NULL_CUDA_REHEARSAL"] = f"{os.getpid()} {Path(record).name}"
    if settings.ranks is not None and settings.ranks > 1:
        set_rank_variables(settings.rank, settings.ranks)
    FakeRanks(settings.rank, settings.ranks, run, learn).install()
    if launched(command).startswith(("accelerate", "trl")):
        replace_simple_launcher(run)
    _take_first_choices()
    _draw_no_weights()
    _leave_what_is_offloaded()
    _run_recurrent_layers_without_cudnn(writer.notes)
    sys.meta_path.insert(0, ModelsNeedNoWeights())
    values = DeviceValues(writer.guessed)
    values.install()
    threading.Thread(target=_say_where_it_waits, args=(writer, values), daemon=True).start()
    status = 0
    try:
        with writer:
            run(command)
    except (CannotRehearse, KeyboardInterrupt, torch.OutOfMemoryError):  # the answer says so
        status = 1
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001
        frames = error.__traceback__
        while frames and frames.tb_next and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames))  # from the script's own first line on
        status = 1
    _leave(status)


def _say_where_it_waits(writer: StepRecorder, values: DeviceValues) -> None:
    """In a thread: a loop may wait for a value that the card never computes."""
    done, zeros = -1, 0
    while True:
        if writer.steps == done:
            why = _cause(values.zeros - zeros)
            place = _place_of_main_thread()
            print(f"rehearsal: no step for {SILENT_S} s, now at {place}{why}", file=sys.stderr, flush=True)
        done, zeros = writer.steps, values.zeros
        time.sleep(SILENT_S)


def _cause(zeros: int) -> str:
    """Name only what is certain: torch counts its running compilations, and `Values` the numbers that it made up."""
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if getattr(handler, "_CompilationCallbackHandler__pending_callbacks_counter", 0):
        return " (torch.compile is compiling)"
    return f" (it has read {count_of(zeros, 'number')} from the card in that time, all as 0)" if zeros else ""


def _place_of_main_thread() -> str:
    """A function of its own: whoever holds on to a frame keeps its tensors, too."""
    file, line = innermost(sys._current_frames()[threading.main_thread().ident or 0])
    return f"{file}:{line}"


def _leave(status: int) -> None:
    """Ends as Python does, but for the destructors of C++, some of which abort where no kernel has run."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush()
    os._exit(status)


def _draw_no_weights() -> None:
    """Skips random initialization of large weights in host memory: zeros serve as well, and take no memory."""
    for where, name in (torch.Tensor, "normal_"), (torch.Tensor, "uniform_"), (torch.nn.init, "_no_grad_trunc_normal_"):
        drawn = getattr(where, name)

        def draw(tensor: torch.Tensor, *args: Any, drawn: Any = drawn, **kwargs: Any) -> torch.Tensor:
            kept = tensor.device.type == "cpu" and tensor.numel() >= LARGE
            return tensor if kept else drawn(tensor, *args, **kwargs)

        setattr(where, name, draw)


def _leave_what_is_offloaded() -> None:
    """Keep large weights and gradients on the host as pages that are never written, which take no memory there: pinning
    and changes of type do not copy them, gradients are neither added up nor scaled, and optimizers skip them."""
    pin, passed_over = torch.Tensor.pin_memory, []

    def is_large(tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.is_floating_point() and tensor.numel() >= LARGE

    def is_offloaded(tensor: torch.Tensor) -> bool:
        return is_large(tensor) and (hasattr(tensor, "_local_tensor") or tensor.is_pinned())

    def pinned(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        return torch.empty_like(tensor, pin_memory=True) if is_large(tensor) else pin(tensor, *args)

    def in_place(change: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensor, *args, **kwargs: tensor if is_offloaded(tensor) else change(tensor, *args, **kwargs)

    def hide(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for weight in (each for group in optimizer.param_groups for each in group["params"] if is_large(each)):
            passed_over.append((weight, weight.grad))
            weight.grad = None

    def show(*_: object) -> None:
        for weight, gradient in passed_over:
            weight.grad = gradient
        passed_over.clear()

    def of_type(change: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(change)
        def converted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if type(tensor) is torch.nn.Parameter and is_large(tensor):
                as_asked = change(tensor.data.flatten()[:0], *args, **kwargs)
                if as_asked.device == tensor.device and as_asked.dtype != tensor.dtype:
                    return torch.empty_like(tensor, dtype=as_asked.dtype)
            return change(tensor, *args, **kwargs)  # type: ignore[no-any-return]

        return converted

    for name in "to", "float", "half", "bfloat16":
        setattr(torch.Tensor, name, of_type(getattr(torch.Tensor, name)))
    torch.Tensor.pin_memory = pinned  # type: ignore[method-assign,assignment]
    for name in "mul_", "__imul__", "__iadd__":
        setattr(torch.Tensor, name, in_place(getattr(torch.Tensor, name)))
    register_optimizer_step_pre_hook(hide)
    register_optimizer_step_post_hook(show)


def _run_recurrent_layers_without_cudnn(notes: set[str]) -> None:
    """A null device does not know how cuDNN lays out the weights of such a layer."""
    torch.nn.RNNBase.flatten_parameters = lambda _: None  # type: ignore[method-assign,assignment]
    for layer in torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN:
        computes = layer.forward

        @functools.wraps(computes)
        def forward(*args: Any, computes: Any = computes, **kwargs: Any) -> Any:
            notes.add(RECURRENT)
            with torch.backends.cudnn.flags(enabled=False):
                return computes(*args, **kwargs)

        layer.forward = forward  # type: ignore[method-assign]


def _take_first_choices() -> None:
    """Autotuning would compile every candidate to time kernels that do nothing."""
    try:
        from triton.runtime.autotuner import Autotuner  # type: ignore[import-untyped]
    except ImportError:
        return
    tuned = Autotuner.__init__

    def with_one(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        tuned(self, fn, arg_names, list(configs or ())[:1], *args, **kwargs)

    Autotuner.__init__ = with_one
    compiles = torch.compile

    @functools.wraps(compiles)
    def compile_first(*args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.callback import callback_handler

        if _choose_first not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(_choose_first)
        return compiles(*args, **kwargs)

    replace(compiles, compile_first)


def _choose_first(*_: object) -> None:
    """Called when something is compiled, which most of what torch.compile is given never is."""
    from torch._inductor import select_algorithm

    select_algorithm.clear_preprocessing_fns()
    select_algorithm.add_preprocessing_fn(lambda choices: choices[:1])


def run(command: Sequence[str]) -> None:
    """Runs what a command line names in this process: a script, `-m module`, or a program that is written in Python."""
    command = without_python(command)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        if command[1] in LAUNCHERS:  # run as a script, it would be a copy of what `send_nothing` has changed
            import_module(command[1]).main()
            return
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    script = script_of(command[0]) or command[0]
    sys.argv = [script, *command[1:]]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


MODELS = "transformers.modeling_utils"
BUILDS = ("dtype", "torch_dtype", "attn_implementation")
"""Arguments of from_pretrained that matter for a model without weights."""


class ModelsNeedNoWeights(MetaPathFinder):
    """Put first into `sys.meta_path`, it waits for the script to import transformers, which takes seconds."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != MODELS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_replace(module: ModuleType) -> None:
                execute(module)
                _need_no_weights(module.PreTrainedModel)

            spec.loader.exec_module = then_replace  # type: ignore[method-assign]
        return spec


def _need_no_weights(models: Any) -> None:
    loads = models.from_pretrained.__func__

    def from_pretrained(cls: Any, name: Any, /, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        try:
            return loads(cls, name, *args, config=config, **{**kwargs, "local_files_only": True})
        except OSError:
            if "quantization_config" in kwargs:
                raise
        built = {key: kwargs.pop(key) for key in BUILDS if kwargs.get(key) not in (None, "auto")}
        device = kwargs.pop("device_map", None)
        if config is None or isinstance(config, str | os.PathLike):
            config, _ = cls.config_class.from_pretrained(config or name, return_unused_kwargs=True, **kwargs)
        print(f"rehearse: no weights of {name} on this machine; it is built from its config", file=sys.stderr)
        model = cls._from_config(config, **built).eval()
        return model if device is None else model.to("cuda")

    models.from_pretrained = classmethod(from_pretrained)


if __name__ == "__main__":
    main(*sys.argv[1:])
