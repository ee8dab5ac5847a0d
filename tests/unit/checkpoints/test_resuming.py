"""A run starts from its complete checkpoints only; other starts are refused with a remedy and remove no file."""

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.unit.checkpoints.checkpoint_files import complete, save
from torchtune_adaptive.checkpoints import store
from torchtune_adaptive.checkpoints.manager import build_checkpointer
from torchtune_adaptive.checkpoints.resuming import Start, decide, identity_of, with_samples_per_step
from torchtune_adaptive.checkpoints.store import Files, Position
from torchtune_adaptive.config.checks import read_full_settings
from torchtune_adaptive.errors import ConfigError, RunFinished


def config(directory: Path, *overrides: str) -> DictConfig:
    base = {
        "output_dir": str(directory),
        "device": "cpu",
        "dtype": "fp32",
        "seed": 0,
        "shuffle": True,
        "batch_size": 2,
        "gradient_accumulation_steps": 1,
        "epochs": 3,
        "model": {"_component_": "m"},
        "dataset": {"_component_": "d", "source": "a"},
        "optimizer": {"_component_": "o", "lr": 1e-3},
        "checkpointer": {"output_dir": "${output_dir}", "checkpoint_files": ["base.pt"]},
        "resume_from_checkpoint": "auto",
    }
    merged = OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(merged, DictConfig)
    return merged


def start(directory: Path, *overrides: str, ranks: int = 1, steps: Callable[[int], int] | None = None) -> Start:
    return decide(read_full_settings(config(directory, *overrides)), "full", ranks, steps)


def saved(
    directory: Path,
    name: str,
    serial: int = 0,
    *,
    recipe: str = "full",
    epochs: int = 1,
    samples_per_step: int | None = None,
    **others: Any,
) -> Path:
    position = Position(epochs=epochs, steps_in_epoch=0, step=4 * epochs)
    identity = identity_of(config(directory), recipe, samples_per_step)
    return save(directory, name, serial, identity=identity, position=position, **others)


def files_of(found: Start) -> Files:
    assert found.files is not None
    return found.files


def test_run_resumes_from_the_newest_complete_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "torchtune_adaptive")
    saved(tmp_path, "epoch_0", 0)
    saved(tmp_path, "step_6", 1)
    (saved(tmp_path, "step_8", 2) / "recipe_state.pt").write_bytes(b"stat")
    (saved(tmp_path, "step_9", 3) / "model-00001-of-00001.bin").write_bytes(b"weighty"[:7])
    (saved(tmp_path, "step_10", 4) / "recipe_state.pt").write_bytes(b"state+")
    (saved(tmp_path, "step_11", 5) / "nested" / "config.json").unlink()
    found = start(tmp_path)
    assert files_of(found).folder == tmp_path / "step_6"
    assert files_of(found).weights == (str(tmp_path / "step_6" / "model-00001-of-00001.bin"),)
    assert files_of(found).recipe_state == str(tmp_path / "step_6" / "recipe_state.pt")
    assert found.serial == 4
    assert sum("skipped" in line for line in caplog.messages) == 4


CHANGES = {
    "model._component_=other": "model._component_ is 'other', but was 'm'",
    "dataset.source=b": "dataset.source is 'b', but was 'a'",
    "dataset.more=1": "dataset.more is 1, but was not set",
    "dataset.source=null": "dataset.source is not set, but was 'a'",
    "seed=7": "seed is 7, but was 0",
    "batch_size=4": "batch_size is 4, but was 2",
    "optimizer.lr=0.5": "optimizer.lr is 0.5, but was 0.001",
}


@pytest.mark.parametrize("change", CHANGES)
def test_setting_of_another_run_is_an_error_with_both_values(tmp_path: Path, change: str) -> None:
    saved(tmp_path, "epoch_0")
    with pytest.raises(ConfigError) as error:
        start(tmp_path, change)
    assert CHANGES[change] in str(error.value)
    assert complete(tmp_path) == ["epoch_0"]


GROWING = ("batch_increase_function=f",)


@pytest.mark.parametrize(
    ("ranks", "sizes", "options", "adapted"),
    [
        (6, (2, 1), (), (2, 1)),
        (1, (2, 1), (), (2, 6)),
        (12, (2, 1), (), (1, 1)),
        (4, (2, 1), (), (1, 3)),
        (1, (12, 1), (), (12, 1)),
        (1, (3, 4), (), (3, 4)),
        (3, (2, 1), GROWING, (2, 2)),
    ],
)
def test_step_keeps_its_samples_on_another_number_of_ranks(
    tmp_path: Path, ranks: int, sizes: tuple[int, int], options: tuple[str, ...], adapted: tuple[int, int]
) -> None:
    saved(tmp_path, "epoch_0", samples_per_step=12, ranks=6)
    changes = f"batch_size={sizes[0]}", f"gradient_accumulation_steps={sizes[1]}"
    assert start(tmp_path, *changes, *options, ranks=ranks).samples_per_step == 12
    settings = read_full_settings(config(tmp_path, *changes, *options))
    now = with_samples_per_step(settings, 12, ranks)
    assert (now.batch_size, now.gradient_accumulation_steps) == adapted


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (5, (), "cannot resume on 5 ranks: a step has 12 samples, .* resume on 1, 2, 3, 4, 6, 12 ranks"),
        (4, (), r"a step has 12 samples \(30 in the checkpoint\), .* resume on 1, 2, 3, 6 ranks"),
        (4, GROWING, "in batches of 2; resume on 1, 2, 3, 6 ranks"),
        (1, ("gradient_accumulation_steps=5",), r"batch_size × gradient_accumulation_steps × 1 ranks = 12\)"),
        (1, ("batch_size=12", *GROWING), "batch_size is 12, but was 2"),
    ],
)
def test_resuming_with_other_samples_in_a_step_is_refused_with_the_remedy(
    tmp_path: Path, ranks: int, options: tuple[str, ...], message: str
) -> None:
    enlarged = {"latest_step_samples": 30} if "30" in message else {}  # by a search
    saved(tmp_path, "epoch_0", samples_per_step=12, ranks=6, **enlarged)
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, *options, ranks=ranks)


def test_another_recipe_is_the_only_reported_change(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0", recipe="lora")
    with pytest.raises(ConfigError, match=r"recipe is 'full', but was 'lora' in"):
        start(tmp_path, "batch_size=4")


def test_microbatch_of_an_optimizer_in_the_backward_is_not_split_on_fewer_ranks(tmp_path: Path) -> None:
    settings = read_full_settings(config(tmp_path, "optimizer_in_bwd=True"))
    with pytest.raises(ConfigError, match="set batch_size to 12 and gradient_accumulation_steps to 1"):
        with_samples_per_step(settings, 12, ranks=1)
    larger = replace(settings, batch_size=12)
    assert with_samples_per_step(larger, 12, ranks=1) == larger


def test_run_counted_in_steps_is_finished_according_to_its_former_ranks(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0", ranks=2)  # after 4 steps
    assert start(tmp_path, steps=lambda ranks: 10 // ranks).files
    with pytest.raises(RunFinished, match="raise num_steps"):
        start(tmp_path, steps=lambda ranks: 8 // ranks)


@pytest.mark.parametrize("change", ["epochs=9", "log_every_n_steps=3", "+adaptive.memory_limit=1GiB", "dtype=bf16"])
def test_epochs_logging_and_limits_may_change(tmp_path: Path, change: str) -> None:
    saved(tmp_path, "epoch_0")
    assert start(tmp_path, change.lstrip("+")).files


def test_finished_run_has_no_work_and_keeps_its_files(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_2", epochs=3, finished=True)
    store.clean(tmp_path)  # as a run does before it ends
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunFinished, match="epoch_2"):
        start(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert start(tmp_path, "epochs=4").files


@pytest.mark.parametrize("steps_in_epoch", [0, 1])
def test_fewer_epochs_than_were_trained_are_an_error(tmp_path: Path, steps_in_epoch: int) -> None:
    position = Position(epochs=2, steps_in_epoch=steps_in_epoch, step=8 + steps_in_epoch)
    save(tmp_path, "epoch_1", identity=identity_of(config(tmp_path), "full"), position=position)
    with pytest.raises(ConfigError, match="epochs above 2"):
        start(tmp_path, "epochs=2")


def test_values_of_the_config_that_json_changes_are_the_same_run(tmp_path: Path) -> None:
    part = {"_component_": "d", "weights": {0: 1, 2: 2, 10: math.nan}}
    cfg = config(tmp_path)
    cfg.dataset, cfg.model.table = [part], {3: math.nan}
    save(tmp_path, "epoch_0", identity=identity_of(cfg, "full"))
    assert decide(read_full_settings(cfg), "full", 1).files


def test_pruning_interrupted_by_a_kill_is_completed_at_the_next_start(tmp_path: Path) -> None:
    """The checkpoint to resume from stays, even if newer ones are unusable."""
    for step in (2, 4, 6):
        saved(tmp_path, f"step_{step}", serial=step)
    (tmp_path / "step_6" / "model-00001-of-00001.bin").write_bytes(b"weighty"[:7])
    assert files_of(start(tmp_path, "keep_last_n_checkpoints=1")).folder.name == "step_4"
    assert complete(tmp_path) == ["step_6", "step_4"]
    assert files_of(start(tmp_path)).folder.name == "step_4"


def test_fresh_start_removes_leftovers_of_a_kill(tmp_path: Path) -> None:
    assert not start(tmp_path / "new" / "out").files
    out = tmp_path / "out"
    for name in (".saving", ".removing-step_3-ab12ab12"):
        (out / name / "epoch_0").mkdir(parents=True)
    (out / "adaptive_run.json.0a1b2c3d.adaptive.tmp").touch()
    of_user = {".saving_later", "notes.20261127.tmp", "draft.my-notes.tmp"}
    for name in of_user:
        (out / name).touch()
    found = start(out)
    assert (found.files, found.serial) == (None, 0)
    assert {path.name for path in out.iterdir()} == {".saving", *of_user}
    assert [path.name for path in (out / ".saving").iterdir()] == [found.directory.mark]


def test_without_an_intact_checkpoint_no_refused_command_is_advised(tmp_path: Path) -> None:
    for serial, name in enumerate(["epoch_0", "step_6"]):
        (saved(tmp_path, name, serial) / "recipe_state.pt").write_bytes(b"stata")
    with pytest.raises(ConfigError, match="choose another output_dir") as error:
        start(tmp_path)
    assert "auto" not in str(error.value)


@pytest.mark.parametrize(("intact", "mode"), [(True, "False"), (False, "False"), (False, "auto")])
def test_start_that_would_mix_with_other_files_is_refused_and_removes_none(
    tmp_path: Path, intact: bool, mode: str
) -> None:
    if intact:
        saved(tmp_path, "epoch_0")
    else:
        (tmp_path / "epoch_0").mkdir()
    remedy = r"resume_from_checkpoint=auto.*another output_dir" if intact else "epoch_0"
    with pytest.raises(ConfigError, match=remedy):
        start(tmp_path, f"resume_from_checkpoint={mode}")
    assert (tmp_path / "epoch_0").is_dir()
    assert complete(tmp_path) == ["epoch_0"] * intact


def test_folder_that_cannot_be_listed_is_an_error_and_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "listdir", mock.Mock(side_effect=PermissionError(13, "Permission denied", str(tmp_path))))
    with pytest.raises(ConfigError, match="Permission denied"):
        start(tmp_path)


def test_output_inside_the_folder_of_weights_is_refused(tmp_path: Path) -> None:
    section = {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(tmp_path)}
    cfg = OmegaConf.create({"checkpointer": section})
    with pytest.raises(ConfigError, match=r"output_dir is inside checkpointer\.checkpoint_dir"):
        build_checkpointer(cfg, tmp_path / "out" / ".saving", None)


def test_file_with_the_name_of_a_checkpoint_is_kept(tmp_path: Path) -> None:
    (tmp_path / "step_3").write_text("my notes")
    assert not start(tmp_path).files
    with pytest.raises(NotADirectoryError):
        save(tmp_path, "step_3")
    assert (tmp_path / "step_3").read_text() == "my notes"
