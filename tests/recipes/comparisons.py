"""Tables of runs. Each run has to equal another one of its group, step by step."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtune.modules.peft import LoRALinear

from tests.captured_logs import captured_log
from tests.ranks import run_on_ranks
from tests.recipes.long.memory_pressure import stages_of
from tests.recipes.ppo.rollouts import run_stock_ppo
from tests.recipes.recorders import assert_same_figures, read_log
from tests.recipes.running import RELATIVE, demo_config, load_ours, run_ours, run_stock, train_until
from tests.timeline import read_timeline
from torchtune_adaptive.checkpoints.store import MANIFEST_FILE
from torchtune_adaptive.rl.ppo import VALUE_FOLDER

STOCK = "stock"


class Run(NamedTuple):
    overrides: tuple[str, ...] = ()
    like: str = STOCK
    """The run with the same figures and weights; empty: none."""
    first: tuple[str, ...] | None = None
    """Overrides of a first start, which ends before the last stage of the step `stop_at` of the group."""
    by_stock: bool = False
    """torchtune's recipe trains."""
    ranks: int | None = None
    """If it differs from the group's."""
    prepare: Callable[[Any], object] = bool
    """Called with our recipe before training; with that of the first start, if there is one."""


@dataclass(frozen=True)
class Group:
    kind: str
    ranks: int
    base: tuple[str, ...]
    """Overrides of all runs. FOLDER stands for the folder of the run."""
    runs: Mapping[str, Run]
    figures: tuple[str, ...] = ("step", "loss", "grad_norm", "lr")
    rel: float = RELATIVE
    abs: float = 0.0
    compares_weights: bool = True
    stock_adds_ranks: bool = False
    """torchtune's LoRA recipe for pairs logs the sum of the losses of all ranks."""
    stop_at: int = 0
    config: Callable[..., Any] | None = None
    """Return the config from folder and overrides; by default `demo_config` of the kind."""


class Finished(NamedTuple):
    """The files of a run."""

    folder: Path

    @property
    def log(self) -> list[dict[str, float]]:
        return read_log(self.folder / "log.jsonl")

    @property
    def steps(self) -> list[dict[str, Any]]:
        return read_timeline(self.folder / "out").steps

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_timeline(self.folder / "out").events if event["kind"] == kind]

    def lines(self, rank: int = 0) -> list[str]:
        """Return the log lines of a rank."""
        lines: list[str] = json.loads((self.folder / f"lines{rank}.json").read_text())
        return lines

    def weights(self) -> dict[str, torch.Tensor]:
        """Load the weights of the last epoch, of PPO's value model too."""
        last = max((self.folder / "out").glob("epoch_*"), key=lambda epoch: int(epoch.name.rpartition("_")[2]))
        found: dict[str, torch.Tensor] = {}
        for file in last.rglob("model-00001-of-00001.bin"):
            weights = torch.load(file, weights_only=True)
            found |= {f"{VALUE_FOLDER in file.parts}.{key}": each for key, each in weights.items()}
        return found


Runs = Callable[[str, str], Finished]
"""Return a run by group and name; the first call runs it."""


def runs_in(groups: Mapping[str, Group]) -> Any:
    """Return a fixture of type Runs for a module."""

    @pytest.fixture(scope="module")
    def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
        folders = {name: tmp_path_factory.mktemp("group") for name in groups}

        def finished(group: str, name: str) -> Finished:
            folder = folders[group] / name
            if not folder.exists():
                ranks = (groups[group].runs[name].ranks if name != STOCK else None) or groups[group].ranks
                run_on_ranks(ranks, run_one, groups[group], name, folder, timeout_s=200, in_group=False)
            return Finished(folder)

        return finished

    return runs


def compared(groups: Mapping[str, Group]) -> list[Any]:
    """Return group and name of every run with a reference, as cases of a test."""
    pairs = [(group, name) for group, of in groups.items() for name, run in of.runs.items() if run.like]
    return [pytest.param(*pair, id=", ".join(pair)) for pair in pairs]


def run_one(group: Group, name: str, folder: Path) -> None:
    """Collective: run one run of a group."""
    os.environ["TORCH_COMPILE_BACKEND"] = "aot_eager"  # Dynamo and AOTAutograd, without code generation
    run = Run(by_stock=True) if name == STOCK else group.runs[name]

    def config(overrides: tuple[str, ...]) -> Any:
        words = [word.replace("FOLDER", str(folder)) for word in (*group.base, *overrides)]
        return group.config(folder, *words) if group.config else demo_config(group.kind, folder, *words)

    folder.mkdir(exist_ok=True)
    with adapters_like_those_of_one_process(), captured_log() as lines:
        if run.first is not None:
            recipe = load_ours(group.kind)(config(run.first))
            recipe.setup()
            run.prepare(recipe)
            train_until(recipe, [*stages_of(recipe).values()][-1], group.stop_at)
        if run.by_stock:
            cfg = config(run.overrides)
            run_stock_ppo(cfg) if group.kind == "full_ppo" else run_stock(group.kind, cfg)
        else:
            run_ours(group.kind, config(run.overrides), run.prepare if run.first is None else bool)
    (folder / f"lines{os.environ['RANK']}.json").write_text(json.dumps(lines))


def assert_equals_its_reference(group: Group, name: str, ours: Finished, reference: Finished) -> None:
    log, expected = ours.log, reference.log
    assert len(expected) >= 2
    if group.stock_adds_ranks and group.runs[name].like == STOCK:
        expected = [{**step, "loss": step["loss"] / group.ranks} for step in expected]
    assert_same_figures(log, expected, group.figures, rel=group.rel, abs=group.abs)
    if not group.runs[name].by_stock:
        manifests = [json.loads(path.read_text()) for path in ours.folder.rglob(MANIFEST_FILE)]
        assert {manifest["identity"]["recipe"] for manifest in manifests} == {group.kind}
    if group.compares_weights:
        torch.testing.assert_close(ours.weights(), reference.weights(), rtol=RELATIVE, atol=1e-6)


def expect_announcements(recipe: Any) -> None:
    """From here on, each step must announce the samples of the next one of its epoch: it costs a collective less."""
    training, steps = recipe.loop.stages.training, recipe.loop.schedule.epochs[0].steps
    run = training.run

    def checked(samples: Any, *, step: int, upcoming: Any = None) -> Any:
        assert (upcoming is None) == (step % steps == 0)
        return run(samples, step=step, upcoming=upcoming)

    training.run = checked


@contextmanager
def adapters_like_those_of_one_process() -> Iterator[None]:
    """Initialize adapters equally on all meshes: DTensor draws different ones on each, and runs could not be
    compared.
    """

    def initialize(layer: LoRALinear) -> None:
        generator = torch.Generator().manual_seed(layer.lora_a.weight.numel())
        nn.init.zeros_(layer.lora_b.weight)
        weight = layer.lora_a.weight.detach()
        drawn = 0.1 * torch.randn(weight.shape, generator=generator)
        if isinstance(weight, DTensor):
            drawn = distribute_tensor(drawn, weight.device_mesh, weight.placements)
        weight.copy_(drawn)

    with mock.patch.object(LoRALinear, "initialize_parameters", initialize):
        yield
