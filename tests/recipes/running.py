"""Runs a recipe, ours or the installed stock one, inside a rank of a test."""

import os
import re
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

from tests.ranks import PATIENCE, meet_anew
from torchtune_adaptive.config.command_line import config_and_overrides, locate, read_config
from torchtune_adaptive.tune import place

STOCK = Path(torchtune.__file__).parent.parent / "recipes"
OURS = {
    "full": ("adaptive_full_finetune_distributed", "AdaptiveFullFinetuneDistributed"),
    "lora": ("adaptive_lora_finetune_distributed", "AdaptiveLoraFinetuneDistributed"),
    "full_dpo": ("adaptive_full_dpo_distributed", "AdaptiveFullDPODistributed"),
    "lora_dpo": ("adaptive_lora_dpo_distributed", "AdaptiveLoraDPODistributed"),
    "full_ppo": ("adaptive_ppo_full_finetune_distributed", "AdaptivePPOFullFinetuneDistributed"),
    "full_grpo": ("adaptive_grpo_full_finetune_distributed", "AdaptiveGRPOFullFinetuneDistributed"),
    "lora_grpo": ("adaptive_grpo_lora_finetune_distributed", "AdaptiveGRPOLoraFinetuneDistributed"),
}
DEMO = {"full_dpo": "dpo"}
"""The demo's config of a kind, where it has another name."""
SGD = ("optimizer._component_=torch.optim.SGD", "optimizer.lr=0.1", "optimizer.momentum=0.9", "optimizer.fused=False")
"""For comparing weights: Adam divides by what may be next to nothing, so that the order in which a CPU adds up can move
a weight by a part of the learning rate."""
RELATIVE = 1e-5
"""By how much losses, gradient norms and, with SGD, weights may differ from CPU to CPU."""
RELATIVE_AFTER_ADAM = 1e-4
"""Likewise losses and gradient norms."""
COMMAND_MARK = "TORCHTUNE_ADAPTIVE_TEST_COMMAND"
STOCK_CLASSES = {
    "full": ("full_finetune_distributed", "FullFinetuneRecipeDistributed"),
    "lora": ("lora_finetune_distributed", "LoRAFinetuneRecipeDistributed"),
    "full_dpo": ("full_dpo_distributed", "FullDPORecipeDistributed"),
    "lora_dpo": ("lora_dpo_distributed", "LoRADPORecipeDistributed"),
}


def demo_config(kind: str, folder: Path, *overrides: str) -> DictConfig:
    """The demo's config of this kind in small, as `config_in` has it."""
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
    """A config of the demo with its output in `folder` and its weights beside it, logging to `log.jsonl`. In a rank, a
    run of it meets at a port of its own."""
    meet_anew()
    cfg = OmegaConf.load(locate(f"adaptive/demo/{demo}"))
    ours = [
        f"output_dir={folder / 'out'}",
        "metric_logger._component_=tests.recipes.recording.JsonLogger",
        f"metric_logger.path={folder / 'log.jsonl'}",
        *(f"{key}.checkpoint_dir={folder.parent / 'weights'}" for key in cfg if str(key).endswith("checkpointer")),
    ]
    merged = OmegaConf.merge(cfg, OmegaConf.from_dotlist([*ours, *overrides]))
    assert isinstance(merged, DictConfig)
    del merged.metric_logger["log_dir"]
    return merged


def load_ours(kind: str) -> Any:
    module, name = OURS[kind]
    return getattr(import_module(module), name)


def load_stock(kind: str) -> Any:
    """The class of the installed stock recipe."""
    module, name = STOCK_CLASSES[kind]
    return runpy.run_path(str(STOCK / f"{module}.py"))[name]


def run_ours(kind: str, cfg: DictConfig) -> Any:
    """Collective: the whole life of our recipe; returns it."""
    recipe = load_ours(kind)(cfg)
    recipe.setup()
    recipe.train()
    recipe.cleanup()
    return recipe


def start_here(kind: str, *arguments: str, train: bool = False) -> None:
    """Our recipe as the command line starts it, on one rank, in this process; without `train` only until it could."""
    try:
        recipe = load_ours(kind)(read_config(*config_and_overrides(arguments)))
        recipe.setup()
        if train:
            recipe.train()
            recipe.cleanup()
    finally:
        place.leave()


def run_stock(kind: str, cfg: DictConfig) -> None:
    """Collective: the whole life of the stock recipe, with the names replaced that fail on a CPU."""
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
    """Averaging, gloo divides in a thread of its own, and corrupts the heap where the tensor has a graph: the DPO
    recipe's loss."""
    if not tensor.requires_grad:
        return reduce(tensor, *args, **options)
    plain = tensor.detach().clone()
    reduced = reduce(plain, *args, **options)
    tensor.data.copy_(plain)
    return reduced


@contextmanager
def stock_on_cpu() -> Iterator[None]:
    """Without what exists on accelerators only."""
    with (
        mock.patch("torchtune.training.get_memory_stats", return_value={}),
        mock.patch("torchtune.training.log_memory_stats"),
        mock.patch("torchtune.training.cleanup_before_training"),
        # for asynchronous checkpoints it asks for gloo beside the device's backend, which here is gloo already
        mock.patch("torch.distributed.init_process_group", partial(join_with_gloo, dist.init_process_group)),
        mock.patch("torch.distributed.all_reduce", partial(reduce_without_graph, dist.all_reduce)),
    ):
        yield


def saved_weights(folder: Path, epoch: int = 0) -> dict[str, torch.Tensor]:
    """What a finished run has saved."""
    loaded: dict[str, torch.Tensor] = torch.load(
        folder / "out" / f"epoch_{epoch}" / "model-00001-of-00001.bin", weights_only=True
    )
    return loaded


@dataclass(frozen=True)
class Finished:
    """A command that has ended by itself."""

    status: int
    output: str
    """What it wrote to stdout and stderr, in the order in which a user sees it."""
    seconds: float


def assert_only_torchruns_report_follows(error: str, output: str) -> None:
    """The error of ours is printed before any traceback, and once more inside torchrun's report."""
    ours, traceback, report = output.partition("Traceback (most recent call last)")
    assert traceback, output
    assert error in ours, output
    assert re.search(r"ChildFailedError: *\n=+\n.* FAILED", report), output
    assert error in report, output


def run_command(command: Sequence[str], *, cwd: Path, timeout_s: float) -> Finished:
    """The command with a mark in its environment, so that none of its processes outlives it, nor the timeout, which is
    for an idle machine.

    torchrun's ranks have sessions of their own, so a session would not be enough.
    """
    timeout_s *= PATIENCE
    began = time.monotonic()
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
    return Finished(process.returncode, output, time.monotonic() - began)


def tune_run(
    recipe: str,
    *arguments: str,
    ranks: int | None,
    cwd: Path,
    timeout_s: float,
    run: Callable[..., Finished] = run_command,
) -> Finished:
    """`tune run`, as a user calls it; without `ranks` there is no launcher, and the recipe runs in tune's process."""
    launcher = [] if ranks is None else ["--nproc_per_node", str(ranks)]
    tune = str(Path(sys.executable).parent / "tune")
    return run([tune, "run", *launcher, recipe, *arguments], cwd=cwd, timeout_s=timeout_s)


def end_marked(name: str, mark: str) -> list[int]:
    """Ends all processes that were started with this mark in their environment; returns which those were."""
    found = marked(name, mark)
    for process in found:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + 10 * PATIENCE
    while marked(name, mark) and time.monotonic() < deadline:  # what is killed takes a moment to end
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
    """What a user's shell has: nothing of a test's, and one thread a process, because the ranks share the cores."""
    from_outside = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        from_outside.pop(key, None)
    return {**from_outside, "OMP_NUM_THREADS": "1"}
