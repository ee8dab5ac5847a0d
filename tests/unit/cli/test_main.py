"""`tune-adaptive ls` and `cp`, and the tables of keys."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ranks import PATIENCE
from torchtune_adaptive.cli.main import main
from torchtune_adaptive.config.registry import FULL, RECIPES, config_files, our_configs, recipe_files, supported_configs

ROOT = Path(__file__).parents[3]


def output_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as left:
        main(words)
    return left.value.code, *capsys.readouterr()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code, out, error = output_of(capsys, *words)
    assert (code, out) == (1, "")
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_every_installed_recipe_is_registered_and_has_a_config() -> None:
    assert RECIPES.keys() == {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert {each.recipe for each in our_configs()} == {*RECIPES}
    assert all(path.is_file() for path in recipe_files().values())


def test_shell_completes_commands_and_configs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output_of(capsys, "--completion")
    words = ["bash", "-c", f"{out}complete -p"]
    completed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert code == 0
    assert {"'ls", "status", "adaptive/demo/full"} <= {*completed.stdout.split()}


def test_ls_lists_supported_configs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output_of(capsys, "ls")
    title, *lines = [tuple(line.split()) for line in out.splitlines()]
    assert (code, title) == (0, ("RECIPE", "CONFIG"))
    assert lines == [(each.recipe, each.name) for each in supported_configs()]
    assert {("adaptive_full_finetune_distributed", name) for name in ("adaptive/demo/full", "llama3_2/1B_full")} < {
        *lines
    }


def test_cp_makes_a_file_that_runs_with_the_printed_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output_of(capsys, "cp", "llama3_2/1B_lora", str(tmp_path / "\\1.v2"))
    copy = tmp_path / "\\1.v2.yaml"
    command = f"tune run --nproc_per_node 2 adaptive_lora_finetune_distributed --config {copy}"
    assert (code, out) == (0, f"copied to {copy}\nrun it with: {command}\n")
    output_of(capsys, "cp", FULL, str(tmp_path))
    assert (tmp_path / f"{FULL}.py").read_bytes() == (ROOT / "recipes" / f"{FULL}.py").read_bytes()


@pytest.mark.parametrize(
    "name", ["adaptive/demo/full", "adaptive/demo/dpo", "adaptive/llama3_2/1B_full", "mistral/7B_full_ppo_low_memory"]
)
def test_copied_config_is_independent_of_the_original(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_of(capsys, "cp", name, str(tmp_path / "mine"))
    original, text = config_files()[name].read_text(), (tmp_path / "mine.yaml").read_text()
    before, after = yaml.safe_load(original), yaml.safe_load(text)
    assert after.pop("output_dir") == str(Path(before.pop("output_dir")).with_name("mine"))
    assert "sequence_length" not in after.get("adaptive", {})
    before.get("adaptive", {}).pop("sequence_length", None)
    assert after == before
    assert f"--config {name}" not in text
    assert "Made by" not in text
    assert f"--config {tmp_path / 'mine.yaml'}" in text


def test_cp_overwrites_only_with_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "there.yaml"
    there.write_text("mine: 1")
    assert "--force" in refused(capsys, "cp", "adaptive/demo/full", str(there))
    assert there.read_text() == "mine: 1"
    (tmp_path / "link.yaml").symlink_to(there)
    assert output_of(capsys, "cp", "adaptive/demo/full", str(tmp_path / "link.yaml"), "--force")[0] == 0
    assert yaml.safe_load(there.read_text())["output_dir"] == "runs/demo/link"
    assert (tmp_path / "link.yaml").is_symlink()


def test_unknown_name_is_an_error_with_similar_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "x")
    assert "qwen2 and unknown" in refused(capsys, "ls", "qwen2", "unknown")
    assert "did you mean adaptive/demo/full" in refused(capsys, "cp", "adaptive/demo/ful.yaml", target)
    assert "llama3_2/1B_full" in refused(capsys, "cp", "llama3.2/1B_full", target)
    assert "tune-adaptive ls" in refused(capsys, "cp", "%%%", target)


def test_tables_of_keys_follow_the_definitions_of_keys() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "keys.py"))
    pages = [page.read_text(encoding="utf-8") for page in tool["PAGES"]]
    for name in tool["TABLES"]:
        assert sum(page.count(tool["begin"](name)) for page in pages) == 1, name
    assert [page for page in pages if tool["renewed"](page) != page] == [], "python tools/keys.py writes them anew"


def test_full_output_device_is_an_error() -> None:
    ls = f"{sys.executable} -c 'from torchtune_adaptive.cli.main import main; main([\"ls\"])' > /dev/full"
    ended = subprocess.run(ls, shell=True, stderr=-1, text=True, timeout=30 * PATIENCE, check=False)
    assert ended.stderr.startswith("error: stdout: No space left on device")
    assert ended.returncode != 0


@pytest.mark.parametrize(
    ("words", "code", "unasked"),
    [
        (["ls"], 0, ("matplotlib",)),
        (["cp", "adaptive/demo/full", "copy"], 0, ("matplotlib",)),
        (["status", "."], 1, ("omegaconf", "numpy")),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_run_without_importing_torch(
    words: list[str], code: int, unasked: tuple[str, ...], tmp_path: Path
) -> None:
    program = (
        "import sys; from torchtune_adaptive.cli.main import main\n"
        f"try: main({words!r})\n"
        f"finally: print([name for name in {('torch', 'torchtune', *unasked)} if name in sys.modules])"
    )
    command, wait_s = [sys.executable, "-c", program], 20 * PATIENCE
    ended = subprocess.run(command, capture_output=True, text=True, timeout=wait_s, check=False, cwd=tmp_path)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (code, "[]"), ended.stderr
