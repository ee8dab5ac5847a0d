"""Importing torch runs no code of ours; unsupported or missing packages end a command with one line."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer

from torchtune_adaptive.dependencies import RECIPES_EXTRA, hide_notices, refuse_torch
from torchtune_adaptive.engine import fsdp, ghost

BLOCK = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in MISSING else self.finder.find_spec(name, *rest)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


def run_without_torchtune(
    code: str, *arguments: str, cwd: Path, missing: Sequence[str] = RECIPES_EXTRA
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that cannot import torchtune and the other packages of the [recipes] extra."""
    command = [sys.executable, "-c", f"MISSING = {missing}\n{BLOCK}{code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, env={**os.environ})


def test_importing_torch_runs_no_code_of_this_package(tmp_path: Path) -> None:
    assert [each.value for each in entry_points(group="torch.backends") if "adaptive" in each.value] == []
    code = (
        "import sys, torch; print([name for name in sys.modules if 'tune_adaptive' in name and 'editable' not in name])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ended.stdout == "[]\n", ended.stderr


@pytest.mark.parametrize("words", [["ls"], ["cp", "adaptive/demo/full", "mine"]])
def test_command_that_needs_torchtune_names_the_extra_in_one_line(words: list[str], tmp_path: Path) -> None:
    main = "from torchtune_adaptive.cli.main import main; main()"
    ended = run_without_torchtune(main, *words, cwd=tmp_path)
    assert ended.returncode == 1
    assert re.match(
        rf"error: tune-adaptive {words[0]} needs \w+, which is not installed: install the \[recipes\] extra",
        ended.stderr,
    )
    assert ended.stderr.count("\n") == 1


LIBRARY = """
from importlib import import_module
import torchtune_adaptive
for name in torchtune_adaptive.__all__:
    getattr(torchtune_adaptive, name)
for name in ("rehearsing", "report.tables"):
    import_module(f"torchtune_adaptive.{name}")
from torchtune_adaptive.cli.main import main
main(["status", "."])
"""


WITHOUT = (*RECIPES_EXTRA, "transformers", "matplotlib")
TRAINER = "from torchtune_adaptive.hf import AdaptiveTrainer as T; print(T.__name__)"


@pytest.mark.parametrize(
    ("code", "missing", "end"),
    [
        (LIBRARY, WITHOUT, (1, ". contains no run\n", "")),
        (TRAINER, sorted({*RECIPES_EXTRA} - {"yaml", "tqdm"}), (0, "AdaptiveTrainer\n")),  # transformers needs these
    ],
    ids=["library and status with torch and numpy", "trainer without torchtune"],
)
def test_library_and_trainer_work_without_the_recipes_extra(
    code: str, missing: Sequence[str], end: tuple[int | str, ...], tmp_path: Path
) -> None:
    ended = run_without_torchtune(code, cwd=tmp_path, missing=missing)
    assert (ended.returncode, ended.stdout, ended.stderr)[: len(end)] == end, ended.stderr


def test_missing_private_name_of_torch_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fsdp.missing_names(fsdp._TOUCHED) == fsdp.missing_names(ghost._TOUCHED) == []
    monkeypatch.delattr(FSDPModule, "set_custom_all_gather")
    monkeypatch.delattr(MaskBuffer, "materialize_mask")
    assert fsdp.missing_names(fsdp._TOUCHED) == ["FSDPModule.set_custom_all_gather"]
    assert fsdp.missing_names(ghost._TOUCHED) == ["MaskBuffer.materialize_mask"]
    assert fsdp.missing_names({fsdp.reset: "root event"}) == ["event in reset()"]
    with pytest.raises(ImportError, match="FSDP2 has no x"):
        refuse_torch("FSDP2 has no x")


def test_only_torchaos_notice_about_extensions_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    hide_notices()
    other = "This dtype is not supported on your GPU"
    for text in ("Skipping import of cpp extensions due to incompatible torch version 2.13.0+cpu", other):
        logging.getLogger("torchao").warning(text)
    assert caplog.messages == [other]
