"""Where a run starts: from what is complete and its own, and with an error that helps from nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.unit.tune.parts.checkpoints.making import CONTENT, complete, save
from torchtune_adaptive.errors import ConfigError, RunFinished
from torchtune_adaptive.tune.parts.checkpoints import folders
from torchtune_adaptive.tune.parts.checkpoints.identity import difference, identity_of, told_values
from torchtune_adaptive.tune.parts.checkpoints.manifest import Position
from torchtune_adaptive.tune.parts.checkpoints.start import Start, decide
from torchtune_adaptive.tune.start import run_file
from torchtune_adaptive.tune.start.settings import read_full_settings
from torchtune_adaptive.tune.start.this_run import RESTARTS

ADAPTER = {"adapter_model.pt": b"adapter", "recipe_state.pt": b"state"}


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


def start(directory: Path, *overrides: str, recipe: str = "full", steps: Callable[[int], int] | None = None) -> Start:
    cfg = config(directory, *overrides)
    return decide(read_full_settings(cfg), recipe, steps)


def saved(
    directory: Path, name: str, serial: int = 0, *, recipe: str = "full", epochs: int = 1, **options: Any
) -> Path:
    position = Position(epochs=epochs, steps_in_epoch=0, samples_in_epoch=0, step=4 * epochs)
    cfg = config(directory)
    identity, told = identity_of(cfg, recipe), told_values(cfg)
    return save(directory, name, serial, identity=identity, told=told, position=position, **options)


def test_an_empty_directory_is_a_fresh_start(tmp_path: Path) -> None:
    begun = start(tmp_path / "new" / "out")
    assert not begun.resumes
    assert begun.serial == 0
    assert start(tmp_path / "new" / "out").run != begun.run


def test_the_newest_complete_checkpoint_is_gone_on_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, "epoch_0", 0)
    saved(tmp_path, "step_6", 1)
    begun = start(tmp_path)
    assert begun.files is not None
    assert begun.files.folder == tmp_path / "step_6"
    assert begun.files.weights == (str(tmp_path / "step_6" / "model-00001-of-00001.bin"),)
    assert begun.files.recipe_state == str(tmp_path / "step_6" / "recipe_state.pt")
    assert (begun.run, begun.serial) == ("run", 2)


def test_a_torn_newer_one_is_passed_over_and_the_log_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "torchtune_adaptive")
    saved(tmp_path, "epoch_0", 0)
    (saved(tmp_path, "step_6", 1) / "recipe_state.pt").write_bytes(b"stat")
    (saved(tmp_path, "step_8", 2) / "model-00001-of-00001.bin").write_bytes(b"weighty"[:7])
    begun = start(tmp_path)
    assert begun.files is not None
    assert begun.files.folder.name == "epoch_0"
    assert sum("passed over" in line for line in caplog.messages) == 2
    assert any("step_8" in line and "not what was saved" in line for line in caplog.messages)
    assert any("resuming from" in line and "epoch_0" in line for line in caplog.messages)


CHANGES = {
    "model._component_=other": ("model._component_", "'other'", "'m'"),
    "dataset.source=b": ("dataset.source", "'b'", "'a'"),
    "dataset.more=1": ("dataset.more", "1", "not given"),
    "seed=7": ("seed", "7", "0"),
    "batch_size=4": ("batch_size", "4", "2"),
    "optimizer.lr=0.5": ("optimizer.lr", "0.5", "0.001"),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_what_makes_another_run_is_an_error_with_both_values(tmp_path: Path, change: str) -> None:
    saved(tmp_path, "epoch_0")
    with pytest.raises(ConfigError) as error:
        start(tmp_path, change)
    for word in (*CHANGES[change], "overwrite_output_dir"):
        assert word in str(error.value)
    assert complete(tmp_path) == ["epoch_0"]


NAMED = ("resume_from_checkpoint=True", "checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.bin]")


def test_a_run_that_the_launcher_restarts_goes_on_from_what_it_has_saved_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, "epoch_0", 0)
    saved(tmp_path, "epoch_1", 1, epochs=2)
    assert folder_of(start(tmp_path, *NAMED)) == "epoch_0"
    run_file.begin(tmp_path, "tune run", tmp_path, serial=2)
    monkeypatch.setenv(RESTARTS, "1")
    assert folder_of(start(tmp_path, *NAMED)) == "epoch_0", "nothing has been saved since"
    saved(tmp_path, "step_6", 2)
    assert folder_of(start(tmp_path, *NAMED)) == "step_6"
    monkeypatch.delenv(RESTARTS)
    assert folder_of(start(tmp_path, *NAMED)) == "epoch_0", "it was asked for, by a command of its own"


def folder_of(begun: Start) -> str:
    assert begun.files is not None
    return Path(begun.files.folder).name


def test_where_nothing_is_intact_no_command_is_advised_that_would_be_refused_again(tmp_path: Path) -> None:
    for serial, name in enumerate(["epoch_0", "step_6"]):
        (saved(tmp_path, name, serial) / "recipe_state.pt").write_bytes(b"stata")
    with pytest.raises(ConfigError) as error:
        start(tmp_path)
    assert "auto" not in str(error.value)
    assert "overwrite_output_dir=True to remove them" in str(error.value)


def test_what_a_reward_is_made_of_does_not_change_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, "epoch_0")
    start(tmp_path, "kl_coeff=0.9", "whiten_rewards=True")
    assert "kl_coeff is 0.9, and was not given; whiten_rewards is True, and was not given" in caplog.text


def test_where_steps_are_counted_a_run_is_finished_by_the_ranks_that_it_had(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0", ranks=2)  # after 4 steps
    assert start(tmp_path, steps=lambda ranks: 10 // ranks).resumes
    with pytest.raises(RunFinished, match="a larger num_steps"):
        start(tmp_path, steps=lambda ranks: 8 // ranks)


@pytest.mark.parametrize("change", ["epochs=9", "log_every_n_steps=3", "+adaptive.memory_limit=1GiB", "dtype=bf16"])
def test_epochs_logging_and_limits_may_change(tmp_path: Path, change: str) -> None:
    saved(tmp_path, "epoch_0")
    assert start(tmp_path, change.lstrip("+")).resumes


def test_a_finished_run_is_nothing_to_do_and_nothing_is_touched(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_2", epochs=3, finished=True)
    folders.clean(tmp_path)  # as a run does before it ends
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunFinished, match=r"nothing left to train.*epoch_2"):
        start(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert start(tmp_path, "epochs=4").resumes


def test_a_finished_run_that_was_killed_before_it_ended_is_tidied_up(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_2", epochs=3, finished=True)
    assert (tmp_path / folders.SAVING).is_dir()
    with pytest.raises(RunFinished):
        start(tmp_path)
    assert not (tmp_path / folders.SAVING).exists()
    assert (tmp_path / folders.LATEST).resolve().name == "epoch_2"


@pytest.mark.parametrize("mode", ["False", "auto"])
def test_folders_without_a_manifest_are_not_touched(tmp_path: Path, mode: str) -> None:
    (tmp_path / "epoch_0").mkdir()
    with pytest.raises(ConfigError, match=r"epoch_0.*resume_from_checkpoint=True.*overwrite_output_dir=True"):
        start(tmp_path, f"resume_from_checkpoint={mode}")
    assert (tmp_path / "epoch_0").is_dir()


def test_a_fresh_start_among_checkpoints_is_refused_and_told_how_to_go_on(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0")
    with pytest.raises(
        ConfigError, match=r"resume_from_checkpoint=auto.*another output_dir.*overwrite_output_dir=True"
    ):
        start(tmp_path, "resume_from_checkpoint=False")
    assert complete(tmp_path) == ["epoch_0"]


def test_overwriting_removes_all_of_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overwrite = ("resume_from_checkpoint=False", "overwrite_output_dir=True")
    saved(tmp_path, "epoch_0")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(ConfigError, match="resume_from_checkpoint=auto"):
        start(tmp_path, *overwrite)
    assert complete(tmp_path) == ["epoch_0"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    decided = start(tmp_path, *overwrite)
    assert (decided.resumes, decided.overwrites) == (False, 1)
    assert complete(tmp_path) == ["epoch_0"], "what is wrong with the rest of the config shows before anything is lost"


def test_going_on_by_itself_never_removes_anything(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0")
    assert start(tmp_path, "overwrite_output_dir=True").resumes
    with pytest.raises(ConfigError, match="seed is 7, and was 0"):
        start(tmp_path, "overwrite_output_dir=True", "seed=7")
    (tmp_path / "epoch_0" / "recipe_state.pt").unlink()
    with pytest.raises(ConfigError, match="resume_from_checkpoint=False and overwrite_output_dir=True"):
        start(tmp_path, "overwrite_output_dir=True")
    assert (tmp_path / "epoch_0").is_dir()


def test_the_weights_to_start_from_are_never_overwritten(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0")
    fresh = ("resume_from_checkpoint=False", "overwrite_output_dir=True")
    with pytest.raises(ConfigError, match=r"checkpointer.checkpoint_dir is .* which would be removed"):
        start(tmp_path, *fresh, f"checkpointer.checkpoint_dir={tmp_path / 'epoch_0'}")
    assert complete(tmp_path) == ["epoch_0"]


@pytest.mark.parametrize(
    ("folder", "named"),
    [
        (".", "checkpointer.checkpoint_files=[epoch_0/model.bin]"),
        ("elsewhere", "checkpointer.checkpoint_files=[../epoch_0/model.bin]"),
        (".", "checkpointer.adapter_checkpoint=epoch_0/adapter.pt"),
    ],
)
def test_nothing_that_the_config_reads_is_overwritten(tmp_path: Path, folder: str, named: str) -> None:
    saved(tmp_path, "epoch_0")
    (tmp_path / folder).mkdir(exist_ok=True)
    fresh = ("resume_from_checkpoint=False", "overwrite_output_dir=True")
    with pytest.raises(ConfigError, match=r"checkpointer.\w+ is .*epoch_0.* which would be removed"):
        start(tmp_path, *fresh, f"checkpointer.checkpoint_dir={tmp_path / folder}", named)
    assert complete(tmp_path) == ["epoch_0"]


@pytest.mark.parametrize("mode", ["auto", "False"])
def test_a_file_with_the_name_of_a_checkpoint_is_left_to_its_owner(tmp_path: Path, mode: str) -> None:
    (tmp_path / "step_3").write_text("my notes")
    with pytest.raises(ConfigError, match=r"step_3' is a file, but has the name of a checkpoint: move it"):
        start(tmp_path, f"resume_from_checkpoint={mode}")
    assert (tmp_path / "step_3").read_text() == "my notes"


@pytest.mark.parametrize(
    "change", ["clip_grad_norm=0.5", "dtype=bf16", "loss._component_=a.b", "tokenizer.max_seq_len=64"]
)
def test_what_a_run_may_change_it_tells(tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str) -> None:
    saved(tmp_path, "epoch_0")
    with caplog.at_level("WARNING"):
        assert start(tmp_path).resumes
        assert caplog.messages == []
        assert start(tmp_path, change).resumes
    assert caplog.messages[0].startswith(f"changed since the checkpoint was saved: {change.split('=')[0]} is ")


def test_a_manifest_that_somebody_has_edited_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, "epoch_0")
    saved(tmp_path, "epoch_1", serial=1)
    file = tmp_path / "epoch_1" / "adaptive_checkpoint.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "identity": None}))
    with caplog.at_level("WARNING"):
        assert start(tmp_path).resumes
    assert "epoch_1 has an adaptive_checkpoint.json that is damaged" in caplog.text


def test_an_adapter_goes_on_beside_the_weights_that_it_was_trained_beside(tmp_path: Path) -> None:
    out, base = tmp_path / "out", tmp_path / "base"
    base.mkdir()
    (base / "base.pt").write_bytes(b"one model")
    where = f"checkpointer.checkpoint_dir={base}"
    identity = identity_of(config(out, where), "lora")
    save(out, "epoch_0", identity=identity, content=ADAPTER)
    assert start(out, where, recipe="lora").resumes
    base.rename(tmp_path / "moved")
    assert start(out, f"checkpointer.checkpoint_dir={tmp_path / 'moved'}", recipe="lora").resumes
    (tmp_path / "moved" / "base.pt").write_bytes(b"two model")
    with pytest.raises(ConfigError, match=r"frozen weights in base\.pt"):
        start(out, f"checkpointer.checkpoint_dir={tmp_path / 'moved'}", recipe="lora")


def test_base_weights_in_many_files_belong_to_an_adapter_too(tmp_path: Path) -> None:
    files = {"filename_format": "base-{}-of-{}.bin", "max_filename": "00002"}
    for folder, second in (("one", b"1"), ("two", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "base-00001-of-00002.bin").write_bytes(b"0")
        (tmp_path / folder / "base-00002-of-00002.bin").write_bytes(second)
    identities = []
    for folder in ("one", "two"):
        cfg = config(tmp_path / "out", f"checkpointer.checkpoint_dir={tmp_path / folder}")
        cfg.checkpointer.checkpoint_files = files
        identities.append(identity_of(cfg, "lora"))
    assert (difference(*identities) or "").startswith("frozen weights in base-00002-of-00002.bin is ")


def test_leftovers_of_a_kill_are_removed(tmp_path: Path) -> None:
    for name in (".saving", ".removing-step_3-ab12", ".linking-ab12"):
        (tmp_path / name / "epoch_0").mkdir(parents=True)
    assert not start(tmp_path).resumes
    assert [path.name for path in tmp_path.iterdir()] == [".saving"]
    assert list((tmp_path / ".saving").iterdir()) == []


def named(directory: Path, *overrides: str, recipe: str = "full") -> Start:
    return start(directory, "resume_from_checkpoint=True", *overrides, recipe=recipe)


def files(name: str) -> str:
    return f"checkpointer.checkpoint_files=[{name}/model-00001-of-00001.bin]"


def test_named_weights_bring_their_own_state(tmp_path: Path) -> None:
    for epoch in range(2):
        saved(tmp_path, f"epoch_{epoch}", epoch, epochs=epoch + 1)
    (tmp_path / "recipe_state").symlink_to("epoch_1")
    begun = named(tmp_path, files("epoch_0"))
    assert begun.files is not None
    assert begun.files.recipe_state == str(tmp_path / "epoch_0" / "recipe_state.pt")
    assert begun.files.complete
    assert (begun.run, begun.serial) == ("run", 2)


def test_the_state_of_one_checkpoint_and_the_weights_of_another_are_refused(tmp_path: Path) -> None:
    for epoch in range(2):
        saved(tmp_path, f"epoch_{epoch}", epoch)
    (tmp_path / "recipe_state").symlink_to("epoch_1")
    state = "checkpointer.recipe_checkpoint=recipe_state/recipe_state.pt"
    with pytest.raises(ConfigError, match=r"weights are those of epoch_0 and the state is that of epoch_1"):
        named(tmp_path, files("epoch_0"), state)


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
    begun = named(tmp_path, files("epoch_0"))
    assert begun.files is not None
    assert begun.files.recipe_state == str(tmp_path / "recipe_state" / "recipe_state.pt")
    assert not begun.files.complete
    assert begun.files.epoch == 0


def test_an_adapter_is_taken_from_where_the_state_is_and_not_from_the_largest_epoch(tmp_path: Path) -> None:
    stock(tmp_path, 7, ADAPTER)
    saved(tmp_path, "epoch_1", recipe="lora", content=ADAPTER)
    begun = named(tmp_path, recipe="lora")
    assert begun.files is not None
    assert begun.files.adapter == str(tmp_path / "epoch_1" / "adapter_model.pt")
    assert begun.files.recipe_state == str(tmp_path / "epoch_1" / "recipe_state.pt")


def test_files_of_two_checkpoints_are_refused(tmp_path: Path) -> None:
    for epoch in range(2):
        saved(tmp_path, f"epoch_{epoch}", epoch)
    both = "epoch_1/model-00001-of-00001.bin,epoch_0/model-00001-of-00001.bin"
    with pytest.raises(ConfigError, match="files of epoch_1 and of epoch_0"):
        named(tmp_path, f"checkpointer.checkpoint_files=[{both}]")


def test_the_rest_of_an_epoch_is_not_read_in_another_order(tmp_path: Path) -> None:
    position = Position(epochs=1, steps_in_epoch=2, samples_in_epoch=8, step=6)
    save(tmp_path, "step_6", identity=identity_of(config(tmp_path), "full"), position=position)
    assert named(tmp_path, files("step_6")).resumes
    with pytest.raises(ConfigError, match=r"middle of an epoch, but shuffle is False, and was True"):
        named(tmp_path, files("step_6"), "shuffle=False")


def test_names_that_are_not_there_are_told_with_those_that_are(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0")
    with pytest.raises(ConfigError, match=r"epoch_5/model-00001-of-00001.bin, which is not there.*epoch_0"):
        named(tmp_path, files("epoch_5"))


def test_a_distributed_checkpoint_is_found_by_its_manifest_or_torchs_last_file(tmp_path: Path) -> None:
    asynchronous = "enable_async_checkpointing=True"
    (tmp_path / "dist_epoch_0").mkdir()
    with pytest.raises(ConfigError, match="no complete dist_epoch"):
        named(tmp_path, asynchronous)
    (tmp_path / "dist_epoch_0" / ".metadata").write_bytes(b"")
    begun = named(tmp_path, asynchronous)
    assert begun.files is not None
    assert begun.files.distributed
    assert begun.files.folder == tmp_path / "dist_epoch_0"


def test_the_number_of_checkpoints_to_keep_may_stand_in_the_checkpointers_section(tmp_path: Path) -> None:
    assert read_full_settings(config(tmp_path, "keep_last_n_checkpoints=2")).keep_last_n_checkpoints == 2
    cfg = config(tmp_path, "checkpointer.keep_last_n_checkpoints=2")
    assert read_full_settings(cfg).keep_last_n_checkpoints == 2
    for wrong in ("0", "many", "[2]"):
        with pytest.raises(ConfigError, match=r"checkpointer\.keep_last_n_checkpoints"):
            read_full_settings(config(tmp_path, f"checkpointer.keep_last_n_checkpoints={wrong}"))
    with pytest.raises(ConfigError, match="leave one of them out"):
        read_full_settings(config(tmp_path, "checkpointer.keep_last_n_checkpoints=2", "keep_last_n_checkpoints=3"))
