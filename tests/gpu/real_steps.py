"""A recipe's step on real tensors in a new process, for the tests of this folder and a benchmark."""

import logging
import math
import multiprocessing
import os
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar
from unittest import mock

import torch
from gpu_rehearsal.device.build import LIBRARY
from omegaconf import DictConfig
from torch import nn
from torchtune import training

from tests import ranks
from tests.gpu.old_cudnn import use_torchs_attention_with_old_cudnn
from tests.null.processes import FORKING_ON_NULL
from tests.recipes.running import demo_config
from torchtune_adaptive.config.checks import read_full_settings, read_lora_settings
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.data.loading import CheckedDataset, Collate, Data, build_collate
from torchtune_adaptive.data.samples import TEXT, Sample
from torchtune_adaptive.engine import snapshot
from torchtune_adaptive.engine.limit_policy import Change
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.memory import CudaMemory
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.probes import TrainingStep
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.engine.tensors import plain_tensors
from torchtune_adaptive.formatting import MemorySize
from torchtune_adaptive.lifecycle.distributed import Devices, free_setup_memory, mesh_of
from torchtune_adaptive.models.model import Unfilled, build_model, phase_boundaries
from torchtune_adaptive.models.optimizer import Optimization
from torchtune_adaptive.objectives.finetuning import ForwardBackward, build_loss

Case = TypeVar("Case")
Result = TypeVar("Result")

GIB = 2**30

AT_ONCE = 5
"""Cases that run in parallel: most time goes into starting processes, and they fit on one card."""


@contextmanager
def side_by_side(run: Callable[[Case], Result], cases: Iterable[Case]) -> Iterator[dict[Case, Future[Result]]]:
    """Yield a future for the result of every case."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {case: pool.submit(run, case) for case in cases}


ON_NULL = LIBRARY in os.environ.get("LD_PRELOAD", "")
"""True on a null device: tests/null/test_gpu.py."""
if ON_NULL:
    snapshot.checksums_of = lambda _: []  # values on a null device have no meaning


@contextmanager
def fresh_processes() -> Iterator[None]:
    """On a GPU, do not fork ranks: importing torchtune initializes CUDA, and forks cannot use it then."""
    how = "spawn" if torch.cuda.is_available() and not ON_NULL else "forkserver"
    context, variables = multiprocessing.get_context(how), {}
    if ON_NULL:
        context.set_forkserver_preload(["tests.null.forkserver_preload"])
        variables = FORKING_ON_NULL
    alone = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # or the compiler would start processes that outlive the test
    with mock.patch.object(ranks, "_CONTEXT", context), mock.patch.dict(os.environ, {**alone, **variables}):
        yield


def use(name: str) -> torch.device:
    """Return the device of this rank; all ranks share one card."""
    logging.disable(logging.WARNING)  # the runner reports every recovery
    os.environ["LOCAL_RANK"] = "0"  # or DeviceMesh and torchtune would expect a card per rank
    device = torch.device(name, 0)
    torch.cuda.set_device(device)
    use_torchs_attention_with_old_cudnn()
    return device


@dataclass(frozen=True)
class RealStep:
    """Model, optimizer and step of the recipe that a config belongs to."""

    settings: Settings
    model: nn.Module
    loss_fn: nn.Module
    collate: Collate
    optimization: Optimization
    device: torch.device

    @cached_property
    def forward_backward(self):
        data = Data(CheckedDataset([]), packed=False, collate=self.collate, loader=None, max_seq_len=None)
        return ForwardBackward(self.model, self.loss_fn, data, self.settings, self.device)

    def runner(self, rows: int, on_change: Callable[[Change], object] = lambda _: None) -> StepRunner[Sample]:
        """Collective: return the runner that the recipe uses."""
        return StepRunner(
            self.model,
            self.forward_backward,
            limit=RowLimit(rows),
            kind=SampleKind(length_of=TEXT.length_of, filler=TEXT.filler),
            recovery=Recovery(self.model, regrow_after=0, on_change=on_change),
        )

    def to_search(self, tokens: int) -> TrainingStep[Sample]:
        """Collective: return the input of `find_max_batch_size`."""
        return TrainingStep(
            runner=self.runner(1),
            sample=worst(tokens),
            update=lambda result: self.optimization.update(result.target_tokens),
            optimizers=self.optimization.optimizers,
            boundaries=phase_boundaries(self.model, self.loss_fn),
            cut=TEXT.cut,
        )

    def train(self, rows: int, tokens: int) -> None:
        """Collective: run a plain step without our code, like a probe."""
        microbatches = [[TEXT.cut(worst(tokens), 2)], [worst(tokens)] * rows]
        target_tokens = sum(self.forward_backward(samples).target_tokens for samples in microbatches)
        self.optimization.update(target_tokens)


def build(cfg: DictConfig, device: torch.device) -> RealStep:
    """Collective: build in the recipe's order, with random weights, in the existing process group."""
    settings, lora = read_lora_settings(cfg) if "lora_attn_modules" in cfg.model else (read_full_settings(cfg), None)
    devices = Devices(device, mesh_of(device, settings))
    torch.manual_seed(0)
    model = build_model(settings, devices, {training.MODEL_KEY: Unfilled()}, with_adapters=lora is not None)
    _fill(model)
    optimization = Optimization(settings, model, {}, device)
    loss_fn = build_loss(settings, model)
    kind = replace(TEXT, ignored_label=loss_fn.ignore_index)
    collate = build_collate(settings, SimpleNamespace(pad_id=0), kind, packed=False)
    free_setup_memory(device)
    return RealStep(settings, model, loss_fn, collate, optimization, device)


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Fill weights with random values: they are uninitialized, and fake peers would not send any."""
    for parameter in model.parameters():
        for plain in plain_tensors(parameter):
            plain.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.02)


def worst(tokens: int) -> Sample:
    return {"tokens": [1] * tokens, "labels": [1] * tokens}


def samples_of(seed: int, count: int, tokens: int, *, mixed: bool = False) -> list[Sample]:
    """Return random tokens with a fixed number per sample, or a log-normal number up to that, as in instruction
    data.
    """
    draw = random.Random(seed)
    lengths = [tokens] * count
    if mixed:
        lengths = [max(4, min(tokens, int(draw.lognormvariate(math.log(tokens / 6), 0.9)))) for _ in range(count)]
    rows = [[draw.randrange(1, 256) for _ in range(length)] for length in lengths]
    return [{"tokens": row, "labels": row} for row in rows]


def limit(limit_bytes: float) -> None:
    """Limit the allocator from here on; infinity removes the limit."""
    CudaMemory(MemorySize(min(limit_bytes, 2**60), is_fraction=False))


def demo(kind: str, device: str, *changes: str, **sizes: int) -> DictConfig:
    """Return the demo's config for a device, with a model of these sizes."""
    model = [f"model.{name}={size}" for name, size in sizes.items()]
    return demo_config(kind, Path("unused"), f"device={device}", *model, *changes)
