"""Run a recipe, ours or the installed stock one, inside a rank of a test."""

import logging
import os
import runpy
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchtune
from omegaconf import DictConfig, OmegaConf
from torch.distributed.tensor import DTensor

from tests.ranks import PATIENCE, run_on_ranks, use_next_port
from torchtune_adaptive.config.command_line import config_and_overrides, locate, read_config
from torchtune_adaptive.engine.ranks import full_tensor
from torchtune_adaptive.lifecycle import distributed

STOCK = Path(torchtune.__file__).parent.parent / "recipes"
OURS = {
    "full": ("adaptive_full_finetune_distributed", "AdaptiveFullFinetuneDistributed"),
    "lora": ("adaptive_lora_finetune_distributed", "AdaptiveLoraFinetuneDistributed"),
    "full_dpo": ("adaptive_full_dpo_distributed", "AdaptiveFullDPODistributed"),
    "lora_dpo": ("adaptive_lora_dpo_distributed", "AdaptiveLoraDPODistributed"),
    "full_ppo": ("adaptive_ppo_full_finetune_distributed", "AdaptivePPOFullFinetuneDistributed"),
    "distillation": ("examples.recipes.distill", "Distillation"),
}
"""Recipes of this package, and an example of a custom one."""
DEMO = {"full_dpo": "dpo"}
"""Names of demo configs that differ from the kind."""
SGD = ("optimizer._component_=torch.optim.SGD", "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.fused=False")
"""Used to compare weights: Adam divides by values near zero, so the order of summation on a CPU can change a weight by
part of the learning rate.
"""
RELATIVE = 1e-5
"""Tolerance between CPUs for losses, gradient norms and, with SGD, weights."""
RELATIVE_AFTER_ADAM = 1e-4
"""The same for losses and gradient norms after Adam."""
COMMAND_MARK = "TORCHTUNE_ADAPTIVE_TEST_COMMAND"
STOCK_CLASSES = {
    "full": ("full_finetune_distributed", "FullFinetuneRecipeDistributed"),
    "lora": ("lora_finetune_distributed", "LoRAFinetuneRecipeDistributed"),
    "full_dpo": ("full_dpo_distributed", "FullDPORecipeDistributed"),
    "lora_dpo": ("lora_dpo_distributed", "LoRADPORecipeDistributed"),
}


def demo_config(kind: str, folder: Path, *overrides: str) -> DictConfig:
    """Return a small demo config of this kind; see `config_in`."""
    small = (
        "dataset.samples=64",
        "batch_size=4",
        "gradient_accumulation_steps=2",
        "use_maximum_batch_size=False",
        "adaptive=null",
        "epochs=1",
    )
    return config_in(folder, DEMO.get(kind, kind), *small, *overrides)


def config_in(folder: Path, demo: str, *overrides: str) -> DictConfig:
    """Return a demo config with its output in `folder`, its weights next to it, and the log in `log.jsonl`. In a rank,
    each run uses a new port. An override "~key" removes a key.
    """
    use_next_port()
    cfg = OmegaConf.load(locate(f"adaptive/demo/{demo}"))
    ours = [
        f"output_dir={folder / 'out'}",
        "metric_logger._component_=tests.recipes.recorders.JsonLogger",
        f"metric_logger.path={folder / 'log.jsonl'}",
        *(f"{key}.checkpoint_dir={folder.parent / 'weights'}" for key in cfg if str(key).endswith("checkpointer")),
    ]
    merged = OmegaConf.merge(cfg, OmegaConf.from_dotlist([*ours, *(each for each in overrides if each[0] != "~")]))
    assert isinstance(merged, DictConfig)
    for name in ("metric_logger.log_dir", *(each[1:] for each in overrides if each[0] == "~")):
        section, _, key = name.rpartition(".")
        del (OmegaConf.select(merged, section) if section else merged)[key]
    return merged


def load_ours(kind: str) -> Any:
    module, name = OURS[kind]
    return getattr(import_module(module), name)


def load_stock(kind: str) -> Any:
    """Return the class of the installed stock recipe."""
    module, name = STOCK_CLASSES[kind]
    return runpy.run_path(str(STOCK / f"{module}.py"))[name]


def run_ours(kind: str, cfg: DictConfig, prepare: Callable[[Any], object] = bool) -> Any:
    """Collective: set up, train and clean up our recipe; return it. Call `prepare` before training."""
    recipe = load_ours(kind)(cfg)
    recipe.setup()
    prepare(recipe)
    recipe.train()
    recipe.cleanup()
    return recipe


class _Stopped(Exception):
    pass


def train_until(recipe: Any, runner: Any, stop_before: int | None) -> None:
    """Collective: train our recipe to the end, or until this runner would run step `stop_before`, like a job queue."""
    run = runner.run

    def run_or_stop(samples: Sequence[Any], *, step: int, **options: Any) -> Any:
        if step == stop_before:
            raise _Stopped
        return run(samples, step=step, **options)

    runner.run = run_or_stop
    try:
        recipe.train()
        recipe.cleanup()
    except _Stopped:
        distributed.leave()
    else:
        assert stop_before is None


def start_in_process(kind: str, *arguments: str) -> None:
    """Start our recipe as the command line does, on one rank, in this process, and stop after setup."""
    try:
        load_ours(kind)(read_config(*config_and_overrides(arguments))).setup()
    finally:
        distributed.leave()


@dataclass(frozen=True)
class Ended:
    """How a rank or a command ended."""

    status: int
    output: str
    """Its stdout and stderr, interleaved as a user sees them."""


def start_as_command(kind: str, arguments: Sequence[str], log: Path) -> Ended:
    """In a rank: run what `tune run` starts, with the output in a file."""
    file, status = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), 0
    for stream in (1, 2):
        os.dup2(file, stream)
    with mock.patch.object(sys, "argv", [OURS[kind][0], *arguments]):
        try:
            runpy.run_module(OURS[kind][0], run_name="__main__")
        except SystemExit as left:
            status = int(left.code or 0)
    logging.shutdown()
    return Ended(status, log.read_text(errors="replace"))


def run_as_command(
    ranks: int, kind: str, folder: Path, *overrides: str, config: Callable[..., DictConfig] | None = None
) -> list[Ended]:
    """Run a config, by default the demo config of this kind, on forked ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    cfg = config(folder, *overrides) if config else demo_config(kind, folder, *overrides)
    OmegaConf.save(cfg, folder / "config.yaml")
    return run_on_ranks(ranks, _run_config, kind, folder, timeout_s=60, in_group=False)


def _run_config(kind: str, folder: Path) -> Ended:
    return start_as_command(kind, ["--config", str(folder / "config.yaml")], folder / f"rank{os.environ['RANK']}")


def run_stock(kind: str, cfg: DictConfig) -> None:
    """Collective: set up, train and clean up the stock recipe, with the calls replaced that fail on a CPU."""
    with stock_on_cpu():
        if kind != "full":
            dist.init_process_group("gloo")
        recipe = load_stock(kind)(cfg)
        recipe.setup(cfg)
        recipe.train()
        recipe.cleanup()


def join_with_gloo(join: Callable[[str], None], _: str) -> None:
    join("gloo")


def reduce_without_graph(reduce: Callable[..., Any], tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """For averages, gloo divides in another thread and corrupts the heap if the tensor has a graph, for example the
    loss of the DPO recipe.
    """
    if not tensor.requires_grad:
        return reduce(tensor, *args, **options)
    plain = tensor.detach().clone()
    reduced = reduce(plain, *args, **options)
    tensor.data.copy_(plain)
    return reduced


@contextmanager
def stock_on_cpu() -> Iterator[None]:
    """Replace calls that exist only on accelerators."""
    with (
        mock.patch("torchtune.training.get_memory_stats", return_value={}),
        mock.patch("torchtune.training.log_memory_stats"),
        mock.patch("torchtune.training.cleanup_before_training"),
        # for asynchronous checkpoints it requests gloo in addition to the device's backend, which is gloo here
        mock.patch("torch.distributed.init_process_group", partial(join_with_gloo, dist.init_process_group)),
        mock.patch("torch.distributed.all_reduce", partial(reduce_without_graph, dist.all_reduce)),
        mock.patch.object(DTensor, "full_tensor", full_tensor),
    ):
        yield


def run_command(command: Sequence[str], *, cwd: Path, timeout_s: float) -> Ended:
    """Run a command with a mark in its environment; kill all its processes at the end or after the timeout (given for
    an idle machine).

    A session would not be enough, because torchrun starts every rank in a new session.
    """
    timeout_s *= PATIENCE
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**environment(), COMMAND_MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end_marked(COMMAND_MARK, mark)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout_s} s: {' '.join(command)}\n{output}") from None
    finally:
        end_marked(COMMAND_MARK, mark)
    return Ended(process.returncode, output)


def tune_run(
    recipe: str,
    *arguments: str,
    ranks: int | None,
    cwd: Path,
    timeout_s: float,
    run: Callable[..., Ended] = run_command,
) -> Ended:
    """Run `tune run` as a user does. Without `ranks`, there is no launcher and the recipe runs in tune's process."""
    launcher = [] if ranks is None else ["--nproc_per_node", str(ranks)]
    tune = str(Path(sys.executable).parent / "tune")
    return run([tune, "run", *launcher, recipe, *arguments], cwd=cwd, timeout_s=timeout_s)


def end_marked(name: str, mark: str) -> list[int]:
    """Kill all processes started with this mark in their environment; return their IDs."""
    found = marked(name, mark)
    for process in found:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + 10 * PATIENCE
    while marked(name, mark) and time.monotonic() < deadline:  # killed processes take a moment to end
        time.sleep(0.05)
    return found


def marked(name: str, mark: str) -> list[int]:
    entry, found = f"{name}={mark}".encode(), []
    for variables in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # ended in the meantime, or another user's
            if entry in variables.read_bytes().split(b"\0"):
                found.append(int(variables.parent.name))
    return found


def environment() -> dict[str, str]:
    """Return a user's environment: without the variables of tests, and with one thread per process because ranks share
    the cores.
    """
    from_outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        from_outside.pop(key, None)
    return {**from_outside, "OMP_NUM_THREADS": "1"}
