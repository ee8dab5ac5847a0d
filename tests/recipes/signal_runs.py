"""Run a recipe on forked ranks, as the command line starts it, and send some ranks a signal at a chosen moment."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from omegaconf import OmegaConf
from torchtune.training import FullModelTorchTuneCheckpointer

from tests.ranks import run_on_ranks
from tests.recipes.running import OURS, demo_config, load_ours
from torchtune_adaptive.engine.probes import Prober
from torchtune_adaptive.engine.step import StepRunner

LOADING, SEARCH, SAVE = "loading", "search", "save"
"""Moments other than step numbers: while weights are loaded, in the second probe, and while a checkpoint is written
(only rank 0 writes; other ranks wait).
"""


@dataclass(frozen=True)
class SignalPlan:
    moment: str | int
    """LOADING, SEARCH or SAVE, or the step whose forward pass receives the signal."""
    ranks: tuple[int, ...] = (0,)
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    """Sent one right after the other."""
    skip: int = 0
    """Number of such moments to skip first."""


@dataclass(frozen=True)
class Ended:
    status: int
    lines: str
    """The output of the rank."""


def run_with_signals(
    ranks: int, kind: str, folder: Path, *overrides: str, blow: SignalPlan | None = None
) -> list[Ended]:
    """Run the command on `ranks` ranks; return how each rank ended."""
    cfg = demo_config(kind, folder, *overrides)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(cfg, folder / "config.yaml")
    return run_on_ranks(ranks, _run_methods, kind, folder, blow, timeout_s=60, in_group=False)


def _run_methods(kind: str, folder: Path, blow: SignalPlan | None) -> Ended:
    from torchtune_adaptive.lifecycle.entry_point import run_recipe

    log = folder / f"lines{os.environ['RANK']}"
    log.unlink(missing_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    recipe, status = load_ours(kind), 0
    with mock.patch.object(sys, "argv", [OURS[kind][0], "--config", str(folder / "config.yaml")]), signals_sent(blow):
        try:
            run_recipe(recipe)
        except SystemExit as left:
            status = int(left.code or 0)
    logging.shutdown()
    return Ended(status, log.read_text())


@contextmanager
def signals_sent(blow: SignalPlan | None) -> Iterator[None]:
    with ExitStack() as patches:
        if blow is None or int(os.environ["RANK"]) not in blow.ranks:
            yield
            return
        strike = _Strike(blow)
        for owner, name, moment in (
            (FullModelTorchTuneCheckpointer, "load_checkpoint", LOADING),
            (Prober, "exchange", SEARCH),
            (FullModelTorchTuneCheckpointer, "save_checkpoint", SAVE),
            (StepRunner, "run", None),
        ):
            patches.enter_context(mock.patch.object(owner, name, strike.before(getattr(owner, name), moment)))
        yield


class _Strike:
    def __init__(self, blow: SignalPlan) -> None:
        self._blow, self._passed = blow, 0

    def before(self, function: Callable[..., Any], moment: str | None) -> Callable[..., Any]:
        def struck(*args: Any, **options: Any) -> Any:
            if self._blow.moment == (options.get("step") if moment is None else moment):
                self._strike()
            return function(*args, **options)

        return struck

    def _strike(self) -> None:
        self._passed += 1
        if self._passed != self._blow.skip + 1:
            return
        for number in self._blow.signals:
            os.kill(os.getpid(), number)
        time.sleep(0.3)  # give the signal thread time to run
