"""Versions that cannot work are refused in one line, and notices that no user can act on are hidden."""

import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from torchtune_adaptive.dependencies import hide_notices, refuse_torch, refuse_unfit_torchao, when_tune_imports_torch
from torchtune_adaptive.engine import fsdp

BIN = Path(sys.executable).parent


def tune(tmp_path: Path, *arguments: str, torchao: str | None = None) -> subprocess.CompletedProcess[str]:
    """torchtune's command beside the installed torchao, or one that says that it is another version."""
    if torchao is not None:
        folder = tmp_path / f"torchao-{torchao}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchao\nVersion: {torchao}\n")
    command = [BIN / "tune", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)


def test_tune_run_beside_a_torchao_that_torchtune_cannot_import_ends_with_one_line(tmp_path: Path) -> None:
    recipe = ("adaptive_full_finetune_distributed", "--config", "adaptive/demo/full")
    ended = tune(tmp_path, "run", *recipe, torchao="0.17.0")
    assert ended.returncode == 1
    assert ended.stderr == "error: torchao 0.17.0 does not work with torchtune: install torchao 0.13 to 0.15\n"
    assert ended.stdout == ""


def test_tune_prints_no_notice_of_a_dependency(tmp_path: Path) -> None:
    ended = tune(tmp_path, "ls")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_name_that_fsdp2_does_not_have_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fsdp.missing_names(fsdp._TOUCHED) == []
    monkeypatch.delattr(FSDPModule, "set_custom_all_gather")
    assert fsdp.missing_names(fsdp._TOUCHED) == ["FSDPModule.set_custom_all_gather"]
    assert fsdp.missing_names({fsdp.reset: "root event"}) == ["event in reset()"]


@pytest.mark.parametrize("arguments", [None, []])
def test_a_python_without_arguments_is_left_alone(arguments: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if arguments is None:
        monkeypatch.delattr(sys, "argv")
    else:
        monkeypatch.setattr(sys, "argv", arguments)
    when_tune_imports_torch()


@pytest.mark.parametrize(
    ("installed", "works"), [("0.14rc1", True), ("0.15.0+git", True), ("0.16a1", False), ("dev", False)]
)
def test_any_form_of_a_version_is_understood(installed: str, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtune_adaptive.dependencies.version", lambda _: installed)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with nullcontext() if works else pytest.raises(ImportError, match=f"torchao {installed} does not work"):
        refuse_unfit_torchao()


def test_a_recipe_refuses_a_torch_without_it_in_one_line_and_a_library_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"torch .* does not work with torchtune-adaptive \(FSDP2 has no x\): install torch 2.13 to 2.15"
    for program, error in (("adaptive_full_finetune_distributed.py", SystemExit), ("train.py", ImportError)):
        monkeypatch.setattr(sys, "argv", [f"/somewhere/{program}"])
        with pytest.raises(error, match=told):
            refuse_torch("FSDP2 has no x")


@pytest.mark.parametrize(
    ("text", "arrives"),
    [
        ("Skipping import of cpp extensions due to incompatible torch version 2.13.0+cpu", False),
        ("This dtype is not supported on your GPU", True),
    ],
)
def test_torchao_is_silent_only_about_extensions(text: str, arrives: bool, caplog: pytest.LogCaptureFixture) -> None:
    hide_notices()
    logging.getLogger("torchao").warning(text)
    assert (text in caplog.messages) is arrives
