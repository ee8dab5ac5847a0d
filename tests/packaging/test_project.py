"""pyproject.toml, the constraints, the workflow and make targets agree with each other and with the imports."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.unit.source import FILES, NAME, PACKAGE, RECIPES, ROOT, imported

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
OURS = {NAME, *(path.stem for path in RECIPES)}
FRAMEWORKS = {"ray": "skyrl/", "skyrl": "skyrl/", "torchtitan": "titan/", "tyro": "titan/"}
"""Frameworks that import a part of this package, with that part. No extra installs them."""
NAMED_OTHERWISE = {"yaml": "pyyaml"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0].lower() for requirement in requirements}


def packages_of(paths: list[Path]) -> set[str]:
    """Return the distributions that these files import; triton comes with torch where there is one."""
    packages = {name.split(".")[0] for path in paths for name in imported(path)}
    found = packages - sys.stdlib_module_names - OURS - {"triton"}
    return {NAMED_OTHERWISE.get(package, package) for package in found}


def test_imports_and_declared_dependencies_agree() -> None:
    extras = PROJECT["optional-dependencies"]
    declared = names([*PROJECT["dependencies"], *extras["recipes"], *extras["hf"]])
    assert packages_of([*FILES, *RECIPES]) - FRAMEWORKS.keys() == declared
    importing = {
        (name, path)
        for path in FILES
        for name in FRAMEWORKS
        if any(each.split(".")[0] == name for each in imported(path))
    }
    assert importing
    assert all(path.relative_to(PACKAGE).as_posix().startswith(FRAMEWORKS[name]) for name, path in importing)


def test_library_imports_only_required_packages() -> None:
    files = [path for path in FILES if path.parent.name in ("engine", "report") or path.parent == PACKAGE]
    adapters = {"omegaconf", "torchtune"}  # imported only in a rehearsal of a recipe
    assert packages_of(files) - names(PROJECT["dependencies"]) == adapters


def test_constraints_pin_allowed_versions_of_declared_packages() -> None:
    """A pinned version outside the declared range would make every installation under constraints fail."""
    extras = [each for extra in PROJECT["optional-dependencies"].values() for each in extra]
    wanted = {each.name.lower(): each for each in map(Requirement, [*PROJECT["dependencies"], *extras])}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {pin.name.lower(): next(iter(pin.specifier)).version for pin in pins}
    assert {"torch", "transformers", "omegaconf"} <= set(pinned) & set(wanted)
    refused = {name for name in set(pinned) & set(wanted) if pinned[name] not in wanted[name].specifier}
    assert refused == set()


@pytest.mark.smoke
def test_workflow_covers_every_supported_python_and_torch() -> None:
    pairs = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]["test-all"]["strategy"]["matrix"]["include"]
    (torch,) = (each.removeprefix("torch") for each in PROJECT["dependencies"] if re.match(r"torch\W", each))
    for pair in pairs:
        assert f"{pair['python']}.1" in SpecifierSet(PROJECT["requires-python"]), pair
        assert f"{pair['torch']}.0" in SpecifierSet(torch), pair
    supported = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each}
    assert {pair["python"] for pair in pairs} == supported
    versions = re.findall(r"^VERSIONS \?= (.*)$", MAKEFILE, re.MULTILINE)[0].split()
    versions += re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert {pair["torch"] for pair in pairs} == {version.rpartition(".")[0] for version in versions}


@pytest.mark.smoke
def test_make_targets_used_by_ci_exist() -> None:
    scripts = WORKFLOW.read_text(encoding="utf-8") + (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    made = set(re.findall(r"\bmake ([a-z-]+)$", scripts, re.MULTILINE))
    assert made == {"docs", "test"}
    assert made <= TARGETS


def test_workflow_of_the_example_passes_inputs_that_the_action_has() -> None:
    action = yaml.safe_load((ROOT / "rehearsal" / "action.yml").read_text(encoding="utf-8"))
    workflow = yaml.safe_load((ROOT / "rehearsal" / "examples" / "ci" / "fits.yml").read_text(encoding="utf-8"))
    (step,) = (each for each in workflow["jobs"]["fits"]["steps"] if "/rehearsal@" in each["uses"])
    assert step["with"].keys() <= action["inputs"].keys()
    assert all(each["shell"] == "bash" for each in action["runs"]["steps"] if "run" in each)  # GitHub requires it
