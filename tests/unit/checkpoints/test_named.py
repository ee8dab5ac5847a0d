"""Resuming from files named in a config: all from one checkpoint, with its state."""

from pathlib import Path

import pytest

from tests.unit.checkpoints.checkpoint_files import CONTENT, save
from tests.unit.checkpoints.run_starts import ADAPTER, config, files_of, saved, start
from torchtune_adaptive.checkpoints.identity import identity_of
from torchtune_adaptive.checkpoints.resuming import Start
from torchtune_adaptive.checkpoints.store import Position
from torchtune_adaptive.errors import ConfigError


def named(directory: Path, *overrides: str, recipe: str = "full") -> Start:
    return start(directory, "resume_from_checkpoint=True", *overrides, recipe=recipe)


def files(name: str) -> str:
    return f"checkpointer.checkpoint_files=[{name}/model-00001-of-00001.bin]"


def test_named_weights_come_with_their_state(tmp_path: Path) -> None:
    for epoch in range(2):
        saved(tmp_path, f"epoch_{epoch}", epoch, epochs=epoch + 1)
    found = named(tmp_path, files("epoch_0"))
    assert files_of(found).recipe_state == str(tmp_path / "epoch_0" / "recipe_state.pt")
    assert found.serial == 2


def test_files_of_two_checkpoints_are_refused(tmp_path: Path) -> None:
    for epoch in range(2):
        saved(tmp_path, f"epoch_{epoch}", epoch)
    state = (files("epoch_0"), "checkpointer.recipe_checkpoint=epoch_1/recipe_state.pt")
    both = "epoch_1/model-00001-of-00001.bin,epoch_0/model-00001-of-00001.bin"
    for overrides in (state, (f"checkpointer.checkpoint_files=[{both}]",)):
        with pytest.raises(ConfigError, match=r"from several checkpoints \(epoch_0, epoch_1\)"):
            named(tmp_path, *overrides)


def test_damaged_named_checkpoint_is_refused_with_an_alternative(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0", 0)
    (saved(tmp_path, "epoch_1", 1) / "recipe_state.pt").write_bytes(b"statE")
    with pytest.raises(ConfigError, match=r"epoch_1 is damaged.*resume_from_checkpoint=auto"):
        named(tmp_path, files("epoch_1"))


def test_checkpoint_whose_files_do_not_match_its_manifest_is_refused(tmp_path: Path) -> None:
    for epoch in range(2):
        saved(tmp_path, f"epoch_{epoch}", epoch)
    (tmp_path / "epoch_0" / "recipe_state.pt").write_bytes(b"longer state")
    with pytest.raises(ConfigError, match=r"is damaged: recipe_state\.pt has 12 bytes, not 5; resume_from.*=auto"):
        named(tmp_path, files("epoch_0"), "checkpointer.recipe_checkpoint=epoch_0/recipe_state.pt")


def stock(directory: Path, epoch: int, content: dict[str, bytes] = CONTENT) -> None:
    folder = directory / f"epoch_{epoch}"
    folder.mkdir(parents=True)
    for name in content:
        if "/" not in name and name != "recipe_state.pt":
            (folder / name).write_bytes(content[name])
    (directory / "recipe_state").mkdir(exist_ok=True)
    (directory / "recipe_state" / "recipe_state.pt").write_bytes(b"state")


def test_torchtunes_files_have_no_manifest_and_are_refused(tmp_path: Path) -> None:
    stock(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"epoch_0 has no adaptive_checkpoint\.json: .* not written by these recipes"):
        named(tmp_path, files("epoch_0"))


def test_adapter_without_a_name_is_that_of_the_newest_checkpoint_not_of_the_largest_epoch(tmp_path: Path) -> None:
    stock(tmp_path, 7, ADAPTER)
    for serial, epoch in enumerate((2, 1)):
        saved(tmp_path, f"epoch_{epoch}", serial, recipe="lora", content=ADAPTER)
    for name in None, 2:
        state = [] if name is None else [f"checkpointer.recipe_checkpoint=epoch_{name}/recipe_state.pt"]
        found = files_of(named(tmp_path, *state, recipe="lora"))
        assert found.adapter == str(tmp_path / f"epoch_{name or 1}" / "adapter_model.pt")
        assert found.recipe_state == str(tmp_path / f"epoch_{name or 1}" / "recipe_state.pt")


def test_order_of_samples_must_not_change_within_an_epoch(tmp_path: Path) -> None:
    position = Position(epochs=1, steps_in_epoch=2, step=6)
    save(tmp_path, "step_6", identity=identity_of(config(tmp_path), "full"), position=position)
    assert named(tmp_path, files("step_6")).resumes
    with pytest.raises(ConfigError, match="cannot resume: shuffle is False, but was True"):
        named(tmp_path, files("step_6"), "shuffle=False")


def test_only_the_data_may_change_between_epochs(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0")
    assert named(tmp_path, files("epoch_0"), "shuffle=False", "dataset.source=b").resumes
    for change in ("model.scale=2", "optimizer.lr=0.5", "batch_size=4"):
        with pytest.raises(ConfigError, match=rf"cannot resume: {change.partition('=')[0]} is"):
            named(tmp_path, files("epoch_0"), change)


def test_missing_names_are_reported_with_existing_ones(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0")
    message = (
        "epoch_5/model-00001-of-00001.bin, which does not exist; resume_from_checkpoint=auto .*; names are relative"
    )
    with pytest.raises(ConfigError, match=rf"{message} to .*, for example .*=\[epoch_0/model-00001-of-00001\.bin\]$"):
        named(tmp_path, files("epoch_5"))
