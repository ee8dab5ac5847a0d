"""A custom recipe (examples/recipes) recovers, saves and resumes like the recipes of the package."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.fault_injection import FaultInjector
from tests.ranks import run_on_ranks
from tests.recipes.interrupted_runs import train_until
from tests.recipes.recorders import read_log
from tests.recipes.running import RELATIVE_AFTER_ADAM, demo_config

DISTILL = Path(__file__).parents[3] / "examples" / "recipes" / "distill.py"
TEACHER = (
    "teacher_model._component_=torchtune_adaptive.demo.model.demo_model",
    "teacher_model.num_layers=2",
    "teacher_checkpointer._component_=torchtune_adaptive.demo.weights.demo_checkpointer",
    "teacher_checkpointer.seed=1",
    "teacher_checkpointer.sizes.num_layers=2",
)
RUN = ("save_every_n_steps=2", "resume_from_checkpoint=auto", "epochs=2")


def distilled(folder: Path, *, fails: bool, stop_before: int | None = None) -> int:
    """Collective: run the recipe to its end or to step `stop_before`; return its recoveries."""
    directory = f"teacher_checkpointer.checkpoint_dir={folder.parent / 'teacher'}"
    cfg = demo_config("full", folder, *TEACHER, directory, *RUN)
    recipe: Any = runpy.run_path(str(DISTILL))["Distillation"](cfg)
    recipe.setup()
    with FaultInjector(recipe.runner) as faults:
        if fails:
            faults.fail_at(rank=1, step=1, operation=150)
        train_until(recipe, recipe.runner, stop_before)
    return int(recipe.runner.recoveries)


def run_all(folder: Path) -> list[int]:
    return [
        distilled(folder / "plain", fails=False),
        distilled(folder / "other", fails=True, stop_before=6),
        distilled(folder / "other", fails=False),
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("distilled")
    recoveries = run_on_ranks(2, run_all, folder, timeout_s=90, in_group=False)
    return folder, recoveries[0]


def test_student_learns_from_its_teacher(runs: tuple[Path, list[int]]) -> None:
    losses = [step["loss"] for step in read_log(runs[0] / "plain" / "log.jsonl")]
    assert losses == sorted(losses, reverse=True)
    assert (runs[0] / "plain" / "out" / "epoch_1" / "model-00001-of-00001.bin").is_file()


def test_neither_oom_nor_a_stop_changes_the_losses(runs: tuple[Path, list[int]]) -> None:
    folder, recoveries = runs
    assert recoveries == [0, 1, 1], "a resumed run goes on counting"
    plain, other = (
        {step["step"]: step for step in read_log(folder / name / "log.jsonl")} for name in ("plain", "other")
    )
    assert other.keys() == plain.keys()
    for number, step in plain.items():
        assert other[number]["loss"] == pytest.approx(step["loss"], rel=RELATIVE_AFTER_ADAM)
        assert other[number]["microbatch_rows"] == step["microbatch_rows"] / 2, "limits survive"
