"""Search for a batch size with accelerate and Lightning, on a model of the tests. Needs the extra `bench`."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

try:
    from accelerate.utils import find_executable_batch_size
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.tuner import Tuner
except ImportError as error:
    raise SystemExit(f"{error}: the peers are not installed; pip install -e '.[bench]'") from None

if TYPE_CHECKING:
    from tests.searched_model import Trained

STEPS = 3
"""Steps for which a batch size is tried: Lightning's default."""


class Found(NamedTuple):
    """The result of a search, and its trials."""

    rows: int
    probes: int
    """Sizes tried."""
    out_of_memory: int
    """Sizes that failed."""


def by_accelerate(starting_rows: int, trained: Trained, device: object) -> Found:
    """Accelerate runs the training itself, with fewer rows each time, until it does not fail."""
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=starting_rows)
    def train(rows: int) -> int:
        tried.append(rows)
        trained.optimizer.zero_grad(set_to_none=True)
        for _ in range(STEPS):
            trained.train([rows, rows])
        return rows

    return Found(train(), len(tried), len(tried) - 1)


def by_lightning(mode: str, trained: Trained, device: object) -> Found:
    """Lightning fits a few steps with each size."""
    module = Module(trained)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        rows = Tuner(trainer).scale_batch_size(module, mode=mode, steps_per_trial=STEPS)
    assert rows is not None, "it is not a fast_dev_run"
    return Found(rows, module.trials, module.trials - module.completed)


class Module(LightningModule):
    """LightningModule of the model; a step is that of `Trained.train`."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.batch_size = 2
        self.trials = 0
        self.completed = 0
        self.model = trained.model
        self._trained = [trained]  # in a list, so that Lightning does not find submodules in it

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(_Repeated(self._trained[0].sample), batch_size=self.batch_size)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._trained[0].optimizer

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        loss: Tensor = self._trained[0].loss(self.model(tokens).flatten(0, 1), tokens.flatten())
        return loss

    def on_train_start(self) -> None:
        self.trials += 1

    def on_train_end(self) -> None:
        self.completed += 1


class _Repeated(Dataset[Tensor]):
    """Dataset that repeats one sample, more often than any search reads it."""

    def __init__(self, sample: Tensor) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Tensor:
        return self._sample


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Lightning's advice on workers, and its line for each trial."""
    logger = logging.getLogger("pytorch_lightning")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
