"""Resuming from the files that a config names: those of one checkpoint, with the state that belongs to them."""

from pathlib import Path

import pytest

from tests.unit.checkpoints.making import CONTENT, save
from tests.unit.checkpoints.starting import ADAPTER, config, files_of, saved, start
from torchtune_adaptive.checkpoints.identity import identity_of
from torchtune_adaptive.checkpoints.resuming import Start
from torchtune_adaptive.checkpoints.store import Position
from torchtune_adaptive.errors import ConfigError


def named(directory: Path, *overrides: str, recipe: str = "full") -> Start:
    return start(directory, "resume_from_checkpoint=True", *overrides, recipe=recipe)


def files(name: str) -> str:
    return f"checkpointer.checkpoint_files=[{name}/model-00001-of-00001.bin]"


def test_named_weights_bring_their_own_state(tmp_path: Path) -> None:
    for epoch in range(2):
        saved(tmp_path, f"epoch_{epoch}", epoch, epochs=epoch + 1)
    begun = named(tmp_path, files("epoch_0"))
    assert files_of(begun).recipe_state == str(tmp_path / "epoch_0" / "recipe_state.pt")
    assert files_of(begun).complete
    assert begun.serial == 2


def test_files_of_two_checkpoints_are_refused(tmp_path: Path) -> None:
    for epoch in range(2):
        saved(tmp_path, f"epoch_{epoch}", epoch)
    state = (files("epoch_0"), "checkpointer.recipe_checkpoint=epoch_1/recipe_state.pt")
    both = "epoch_1/model-00001-of-00001.bin,epoch_0/model-00001-of-00001.bin"
    for overrides in (state, (f"checkpointer.checkpoint_files=[{both}]",)):
        with pytest.raises(ConfigError, match=r"of several checkpoints \(epoch_0, epoch_1\)"):
            named(tmp_path, *overrides)


def test_a_named_checkpoint_that_is_damaged_is_refused_and_another_one_named(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0", 0)
    (saved(tmp_path, "epoch_1", 1) / "recipe_state.pt").write_bytes(b"statE")
    with pytest.raises(ConfigError, match=r"epoch_1 is damaged.*resume_from_checkpoint=auto"):
        named(tmp_path, files("epoch_1"))


def stock(directory: Path, epoch: int, content: dict[str, bytes] = CONTENT) -> None:
    folder = directory / f"epoch_{epoch}"
    folder.mkdir(parents=True)
    for name in content:
        if "/" not in name and name != "recipe_state.pt":
            (folder / name).write_bytes(content[name])
    (directory / "recipe_state").mkdir(exist_ok=True)
    (directory / "recipe_state" / "recipe_state.pt").write_bytes(b"state")


def test_torchtunes_own_files_are_taken_and_left_to_be_compared_when_they_are_read(tmp_path: Path) -> None:
    stock(tmp_path, 0)
    found = files_of(named(tmp_path, files("epoch_0")))
    assert found.recipe_state == str(tmp_path / "recipe_state" / "recipe_state.pt")
    assert not found.complete


def test_an_adapter_is_taken_from_where_the_state_is_and_not_from_the_largest_epoch(tmp_path: Path) -> None:
    stock(tmp_path, 7, ADAPTER)
    saved(tmp_path, "epoch_1", recipe="lora", content=ADAPTER)
    found = files_of(named(tmp_path, recipe="lora"))
    assert found.adapter == str(tmp_path / "epoch_1" / "adapter_model.pt")
    assert found.recipe_state == str(tmp_path / "epoch_1" / "recipe_state.pt")


def test_the_rest_of_an_epoch_is_not_read_in_another_order(tmp_path: Path) -> None:
    position = Position(epochs=1, steps_in_epoch=2, step=6)
    save(tmp_path, "step_6", identity=identity_of(config(tmp_path), "full"), position=position)
    assert named(tmp_path, files("step_6")).resumes
    with pytest.raises(ConfigError, match="cannot resume: shuffle is False, but was True"):
        named(tmp_path, files("step_6"), "shuffle=False")


def test_names_that_are_not_there_are_told_with_those_that_are(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0")
    told = "epoch_5/model-00001-of-00001.bin, which does not exist; resume_from_checkpoint=auto .*; names are relative"
    with pytest.raises(ConfigError, match=rf"{told} to .*, for example .*=\[epoch_0/model-00001-of-00001\.bin\]$"):
        named(tmp_path, files("epoch_5"))


def test_a_distributed_checkpoint_is_found_by_its_manifest_or_torchs_last_file(tmp_path: Path) -> None:
    asynchronous = "enable_async_checkpointing=True"
    (tmp_path / "dist_epoch_0").mkdir()
    with pytest.raises(ConfigError, match="no complete dist_epoch"):
        named(tmp_path, asynchronous)
    (tmp_path / "dist_epoch_0" / ".metadata").write_bytes(b"")
    found = files_of(named(tmp_path, asynchronous))
    assert found.distributed
    assert found.folder == tmp_path / "dist_epoch_0"
