"""A run starts from its complete checkpoints only, and otherwise fails with a helpful error."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoints.checkpoint_files import complete, save
from tests.unit.checkpoints.run_starts import ADAPTER, config, files_of, saved, start
from torchtune_adaptive.checkpoints import store
from torchtune_adaptive.checkpoints.identity import difference, identity_of
from torchtune_adaptive.errors import ConfigError, RunFinished
from torchtune_adaptive.lifecycle import run_state
from torchtune_adaptive.lifecycle.run_state import THIS_RUN


def test_run_resumes_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0", 0)
    saved(tmp_path, "step_6", 1)
    begun = start(tmp_path)
    assert files_of(begun).folder == tmp_path / "step_6"
    assert files_of(begun).weights == (str(tmp_path / "step_6" / "model-00001-of-00001.bin"),)
    assert files_of(begun).recipe_state == str(tmp_path / "step_6" / "recipe_state.pt")
    assert begun.serial == 2


def test_incomplete_newer_checkpoint_is_skipped_with_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "torchtune_adaptive")
    saved(tmp_path, "epoch_0", 0)
    (saved(tmp_path, "step_6", 1) / "recipe_state.pt").write_bytes(b"stat")
    (saved(tmp_path, "step_8", 2) / "model-00001-of-00001.bin").write_bytes(b"weighty"[:7])
    assert files_of(start(tmp_path)).folder.name == "epoch_0"
    assert sum("skipped" in line for line in caplog.messages) == 2
    assert any("step_8" in line and "has changed" in line for line in caplog.messages)
    assert any("resuming from" in line and "epoch_0" in line for line in caplog.messages)


CHANGES = {
    "model._component_=other": ("model._component_", "'other'", "'m'"),
    "dataset.source=b": ("dataset.source", "'b'", "'a'"),
    "dataset.more=1": ("dataset.more", "1", "not set"),
    "seed=7": ("seed", "7", "0"),
    "batch_size=4": ("batch_size", "4", "2"),
    "optimizer.lr=0.5": ("optimizer.lr", "0.5", "0.001"),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_setting_of_another_run_is_an_error_with_both_values(tmp_path: Path, change: str) -> None:
    saved(tmp_path, "epoch_0")
    with pytest.raises(ConfigError) as error:
        start(tmp_path, change)
    for word in (*CHANGES[change], "overwrite_output_dir"):
        assert word in str(error.value)
    assert complete(tmp_path) == ["epoch_0"]


def test_distributed_checkpoint_is_unpickled_only_if_the_config_requests_its_format(tmp_path: Path) -> None:
    saved(tmp_path, "step_6", distributed=True)
    with pytest.raises(
        ConfigError, match=r"step_6 is in the format .* unpickles, .* set enable_async_checkpointing=True"
    ):
        start(tmp_path)
    assert files_of(start(tmp_path, "enable_async_checkpointing=True")).distributed


NAMED = ("resume_from_checkpoint=True", "checkpointer.checkpoint_files=[epoch_0/model-00001-of-00001.bin]")


def test_restarted_run_resumes_from_its_latest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, "epoch_0", 0)
    saved(tmp_path, "epoch_1", 1, epochs=2)
    assert files_of(start(tmp_path, *NAMED)).folder.name == "epoch_0"
    run_state.record_start(tmp_path, "tune run", tmp_path, serial=2)
    monkeypatch.setattr(THIS_RUN, "restarted", True)
    assert files_of(start(tmp_path, *NAMED)).folder.name == "epoch_0", "no newer checkpoint"
    saved(tmp_path, "step_6", 2)
    assert files_of(start(tmp_path, *NAMED)).folder.name == "step_6"
    monkeypatch.setattr(THIS_RUN, "restarted", False)
    assert files_of(start(tmp_path, *NAMED)).folder.name == "epoch_0", "requested by a new command"


def test_run_counted_in_steps_is_finished_according_to_its_former_ranks(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_0", ranks=2)  # after 4 steps
    assert start(tmp_path, steps=lambda ranks: 10 // ranks).resumes
    with pytest.raises(RunFinished, match="raise num_steps"):
        start(tmp_path, steps=lambda ranks: 8 // ranks)


@pytest.mark.parametrize("change", ["epochs=9", "log_every_n_steps=3", "+adaptive.memory_limit=1GiB", "dtype=bf16"])
def test_epochs_logging_and_limits_may_change(tmp_path: Path, change: str) -> None:
    saved(tmp_path, "epoch_0")
    assert start(tmp_path, change.lstrip("+")).resumes


def test_finished_run_has_no_work_and_keeps_its_files(tmp_path: Path) -> None:
    saved(tmp_path, "epoch_2", epochs=3, finished=True)
    store.clean(tmp_path)  # as a run does before it ends
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunFinished, match=r"nothing left to train.*epoch_2"):
        start(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert start(tmp_path, "epochs=4").resumes


def test_interrupted_clean_up_of_a_finished_run_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4, 6):
        saved(tmp_path, f"step_{step}", serial=step)
    saved(tmp_path, "epoch_2", serial=8, epochs=3, finished=True)
    (tmp_path / store.REMOVING).mkdir()
    (tmp_path / "adaptive_report.png.tmp").touch()

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "remove", killed)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, "keep_last_n_checkpoints=1")
    monkeypatch.undo()
    with pytest.raises(RunFinished):
        start(tmp_path, "keep_last_n_checkpoints=1")
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_2"]


def test_adapter_resumes_with_the_base_weights_it_was_trained_with(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("named", ["[{}/rows.jsonl]", "{}/*.jsonl", "file://{}/rows.jsonl", "{}"])
def test_changed_data_file_is_another_run(tmp_path: Path, named: str) -> None:
    data = tmp_path / "data" / "rows.jsonl"
    data.parent.mkdir()
    data.write_text("one\ntwo\n")
    changes = ("dataset._component_=d", f"dataset.data_files={named.format(data.parent)}")
    identity = identity_of(config(tmp_path / "out", *changes), "full")
    save(tmp_path / "out", "epoch_0", identity=identity)
    assert start(tmp_path / "out", *changes).resumes
    data.write_text("two\none\n")
    with pytest.raises(ConfigError, match=r"content of .*data.* is '8 bytes, .*', but was '8 bytes, "):
        start(tmp_path / "out", *changes)


def test_pruning_interrupted_by_a_kill_is_completed_at_the_next_start(tmp_path: Path) -> None:
    """The checkpoint to resume from stays, even if newer ones are unusable."""
    for step in (2, 4, 6):
        saved(tmp_path, f"step_{step}", serial=step)
    (tmp_path / "step_6" / "model-00001-of-00001.bin").write_bytes(b"weighty"[:7])
    assert files_of(start(tmp_path, "keep_last_n_checkpoints=1")).folder.name == "step_4"
    assert complete(tmp_path) == ["step_6", "step_4"]
    assert files_of(start(tmp_path)).folder.name == "step_4"


def test_other_initial_weights_of_full_finetuning_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("base", "other"):
        (tmp_path / name).write_text(name)
    named = (f"checkpointer.checkpoint_dir={tmp_path}", "checkpointer.checkpoint_files=[base]")
    other = (named[0], "checkpointer.checkpoint_files=[other]")
    save(tmp_path / "out", "epoch_0", identity=identity_of(config(tmp_path / "out", *named), "full"))
    assert start(tmp_path / "out", *named).resumes
    assert not any("names other weights" in line for line in caplog.messages)
    assert start(tmp_path / "out", *other).resumes
    assert any("names other weights" in line for line in caplog.messages)


def test_damaged_checkpoint_does_not_count_towards_those_that_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        saved(tmp_path, f"step_{step}", serial=step)
    (tmp_path / "step_6" / "model-00001-of-00001.bin").write_bytes(b"weighty"[:7])
    begun = start(tmp_path, "keep_last_n_checkpoints=2")
    assert complete(tmp_path) == ["step_6", "step_4", "step_2"]
    saved(tmp_path, "step_5", serial=begun.serial)
    store.prune(tmp_path, 2, None, begun.damaged)
    assert complete(tmp_path) == ["step_5", "step_6", "step_4"]
    saved(tmp_path, "step_6", serial=begun.serial + 1)  # saved again, intact: it counts
    store.prune(tmp_path, 2, None, begun.damaged)
    assert complete(tmp_path) == ["step_6", "step_5"]


def test_base_weights_in_several_files_belong_to_an_adapter_too(tmp_path: Path) -> None:
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


def test_fresh_start_removes_leftovers_of_a_kill(tmp_path: Path) -> None:
    assert not start(tmp_path / "new" / "out").resumes
    out = tmp_path / "out"
    for name in (".saving", ".removing-step_3-ab12"):
        (out / name / "epoch_0").mkdir(parents=True)
    begun = start(out)
    assert (begun.resumes, begun.serial) == (False, 0)
    assert [path.name for path in out.iterdir()] == [".saving"]
    assert [path.name for path in (out / ".saving").iterdir()] == [begun.claim.mark]
