"""The wheel in an environment without other files of this project."""

import shutil
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.recipes.running import Ended, run_command

ROOT = Path(__file__).parents[2]
RECIPES = {path.name for path in (ROOT / "recipes").glob("*.py")}
CONFIGS = {path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
TUNE = ("-m", "torchtune._cli.tune", "run")


def run_ok(*command: str, cwd: Path) -> Ended:
    ended = run_command(command, cwd=cwd, timeout_s=120)
    assert ended.status == 0, ended.output
    return ended


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, because building leaves files in the source tree."""
    source = tmp_path_factory.mktemp("source") / "project"
    leave_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "runs", "__pycache__")
    shutil.copytree(ROOT, source, ignore=leave_out)
    # torch needs setuptools, so it is installed already
    run_ok(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "out", cwd=source)
    (built,) = (source / "out").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with the wheel and the test environment's packages, without this project."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python3*/site-packages")
    # a path in a .pth file is searched, but the .pth files in it (for example of editable installs) are not read
    (site / "the-others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    install = ("install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    run_ok(sys.executable, "-m", "pip", "--python", str(python), *install, str(wheel), cwd=folder)
    return str(python)


def test_wheel_contains_recipes_modules_configs_licence_and_type_marker_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    assert {name for name in files if "/" not in name} == RECIPES
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "torchtune_adaptive").rglob("*.py")}
    assert {*modules, "torchtune_adaptive/py.typed"} <= files
    prefix = "torchtune_adaptive/configs/"
    assert {name.removeprefix(prefix) for name in files if name.endswith(".yaml")} == CONFIGS
    assert {"demo/full.yaml", "demo/lora.yaml"} < CONFIGS
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)
    tops = {name.split("/")[0] for name in files if "/" in name and ".dist-info/" not in name}
    assert tops == {"torchtune_adaptive"}


def test_installed_package_is_the_wheel(python: str, tmp_path: Path) -> None:
    names = ["torchtune_adaptive", "torchtune_adaptive.configs", "adaptive_full_finetune_distributed"]
    look = f"from importlib.util import find_spec\nfor name in {names}: print(find_spec(name).origin)"
    places = run_ok(python, "-c", look, cwd=tmp_path).output.split()
    assert len(places) == len(names)
    assert all(Path(place).is_relative_to(Path(python).parents[1]) for place in places), places


@pytest.mark.smoke("one-process")
@pytest.mark.parametrize("launcher", [(), ("--nproc_per_node", "2")], ids=["one-process", "two-ranks"])
def test_tune_runs_a_recipe_from_an_empty_directory(python: str, tmp_path: Path, launcher: tuple[str, ...]) -> None:
    recipe = ("adaptive_full_finetune_distributed", "--config", "adaptive/demo/full")
    changes = ("dataset.samples=16", "epochs=1", "output_dir=out")
    ended = run_ok(python, *TUNE, *launcher, *recipe, *changes, cwd=tmp_path)
    assert "samples a step" in ended.output
    assert list((tmp_path / "out" / "epoch_0").glob("model-*.bin"))
