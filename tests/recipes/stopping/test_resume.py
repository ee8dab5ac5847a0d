"""A run that was stopped and resumed, by our recipe or by the stock one, is the run that was never stopped."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtune.training import FullModelTorchTuneCheckpointer

from tests.ranks import run_on_ranks
from tests.recipes.recording import read_log
from tests.recipes.running import (
    RELATIVE,
    RELATIVE_AFTER_ADAM,
    SGD,
    demo_config,
    run_ours,
    run_stock,
    saved_weights,
)
from tests.recipes.stops import stopped_before

EPOCHS, STEPS_PER_EPOCH = 3, 3
WHOLE_RUN = (
    f"epochs={EPOCHS}",
    f"max_steps_per_epoch={STEPS_PER_EPOCH}",
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=2",
)
ADAMW: tuple[str, ...] = ()
"""As in the demo's config."""
SAVED_WEIGHTS = "checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.bin]"
SAVED_STATE = "checkpointer.recipe_checkpoint=epoch_0/recipe_state.pt"
ASYNC = ("enable_async_checkpointing=True",)
IN_BACKWARD = ("optimizer_in_bwd=True", "gradient_accumulation_steps=1", "clip_grad_norm=null")
ADAPTER_ONLY = ("save_adapter_weights_only=True",)


@dataclass(frozen=True)
class Case:
    """Who trains the first epoch, and who the others; with what besides; and what is given only to resume."""

    first: str = "ours"
    then: str = "ours"
    overrides: tuple[str, ...] = ()
    to_resume: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = SGD
    like: str = "never-stopped"


FULL = {
    "ours": Case(to_resume=(SAVED_WEIGHTS,)),
    "ours-by-stock": Case(then="stock", to_resume=(SAVED_WEIGHTS, SAVED_STATE)),
    "stock-by-ours": Case(first="stock", optimizer=ADAMW, to_resume=(SAVED_WEIGHTS,), like="never-stopped-adamw"),
    "async-in-backward": Case(overrides=(*ASYNC, *IN_BACKWARD), like="never-stopped-in-backward"),
}
LORA = {
    "ours": Case(),
    "adapter-only": Case(overrides=ADAPTER_ONLY),
}
CASES = {"full": FULL, "lora": LORA}
NEVER_STOPPED = {
    "full": {
        "never-stopped": Case(),
        "never-stopped-adamw": Case(optimizer=ADAMW),
        "never-stopped-in-backward": Case(overrides=IN_BACKWARD),
    },
    "lora": {"never-stopped": Case()},
}
"""Who trains the first epoch of these trains the others, too."""
ALL = [(kind, case) for kind, cases in CASES.items() for case in cases]
WEIGHTS = [(kind, case) for kind, case in ALL if case != "adapter-only" and CASES[kind][case].optimizer == SGD]


def run_all(kind: str, folder: Path) -> None:
    """Collective: everything that the tests of one recipe compare."""
    for name, case in NEVER_STOPPED[kind].items():
        run(kind, case.first, folder / name, (*case.optimizer, *case.overrides))
    for name, case in CASES[kind].items():
        overrides = (*case.optimizer, *case.overrides)
        with stopped_before(1):
            run(kind, case.first, folder / name, overrides)
        resume = (*overrides, *case.to_resume, "resume_from_checkpoint=True")
        run(kind, case.then, folder / name, resume)


def run(kind: str, who: str, folder: Path, overrides: tuple[str, ...]) -> None:
    start = run_ours if who == "ours" else run_stock
    start(kind, demo_config(kind, folder, *WHOLE_RUN, *overrides))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folders: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            run_on_ranks(2, run_all, kind, folders[kind], timeout_s=300, in_group=False)
        return folders[kind]

    return of


@pytest.mark.parametrize(("kind", "case"), ALL)
def test_every_step_is_that_of_the_run_that_was_never_stopped(runs: Any, kind: str, case: str) -> None:
    folder = runs(kind)
    whole, resumed = (read_log(folder / name / "log.jsonl") for name in (CASES[kind][case].like, case))
    assert [step["step"] for step in resumed] == [step["step"] for step in whole]
    relative = RELATIVE_AFTER_ADAM if CASES[kind][case].optimizer == ADAMW else RELATIVE
    assert len(whole) == EPOCHS * STEPS_PER_EPOCH
    assert len({step["lr"] for step in whole}) == len(whole)
    for step_of_whole, step in zip(whole, resumed, strict=True):
        for figure in {"loss", "lr", "grad_norm"} & step_of_whole.keys():
            assert step[figure] == pytest.approx(step_of_whole[figure], rel=relative), (step["step"], figure)


@pytest.mark.parametrize(("kind", "case"), WEIGHTS)
def test_the_last_weights_are_those_of_the_run_that_was_never_stopped(runs: Any, kind: str, case: str) -> None:
    folder = runs(kind)
    whole, resumed = (saved_weights(folder / name, EPOCHS - 1) for name in (CASES[kind][case].like, case))
    torch.testing.assert_close(resumed, whole, rtol=RELATIVE, atol=1e-6)


def test_only_the_adapter_is_saved_when_only_the_adapter_is_asked_for(runs: Any) -> None:
    whole, adapter_only = (runs("lora") / case / "out" / f"epoch_{EPOCHS - 1}" for case in ("ours", "adapter-only"))
    assert list(whole.glob("model*.bin"))
    assert not list(adapter_only.glob("model*"))
    expected, saved = (torch.load(epoch / "adapter_model.pt", weights_only=True) for epoch in (whole, adapter_only))
    torch.testing.assert_close(saved, expected, rtol=RELATIVE, atol=1e-6)


def test_an_unfinished_checkpoint_is_what_torchtunes_checkpointer_expects(runs: Any) -> None:
    ours, stock = (load(runs("full") / case / "out") for case in ("ours", "stock-by-ours"))
    assert ours.keys() == stock.keys()
    assert ours["model"].keys() == stock["model"].keys()
    assert ours["optimizer"].keys() == stock["optimizer"].keys()
    assert [ours[key] for key in ("seed", "total_epochs", "max_steps_per_epoch")] == [0, EPOCHS, STEPS_PER_EPOCH]


def load(output_dir: Path) -> dict[str, Any]:
    """What torchtune's own checkpointer reads of the last epoch that a run can be resumed from."""
    checkpointer = FullModelTorchTuneCheckpointer(
        checkpoint_dir=str(output_dir.parent.parent / "weights"),
        checkpoint_files=[f"epoch_{EPOCHS - 2}/model-00001-of-00001.bin"],
        recipe_checkpoint=f"epoch_{EPOCHS - 2}/recipe_state.pt",
        model_type="LLAMA3",
        output_dir=str(output_dir),
        should_load_recipe_state=True,
    )
    loaded: dict[str, Any] = checkpointer.load_checkpoint()
    return loaded
