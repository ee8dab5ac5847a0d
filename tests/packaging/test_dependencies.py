"""The package declares exactly the dependencies that it imports."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.unit.source import FILES, NAME, PACKAGE, RECIPES, ROOT, imported

OURS = {NAME, *(path.stem for path in RECIPES)}
FRAMEWORKS = {"ray": "skyrl/", "skyrl": "skyrl/", "pytest": "pytest_plugin.py"}
"""Frameworks that import a part of this package, with that part. No extra installs them."""
NAMED_OTHERWISE = {"yaml": "pyyaml"}


def project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0].lower() for requirement in requirements}


def packages_of(paths: list[Path]) -> set[str]:
    """Return the distributions that these files import; triton comes with torch where there is one."""
    packages = {name.split(".")[0] for path in paths for name in imported(path)}
    found = packages - sys.stdlib_module_names - OURS - {"triton"}
    return {NAMED_OTHERWISE.get(package, package) for package in found}


def test_imports_and_declared_dependencies_agree() -> None:
    extras = project()["optional-dependencies"]
    declared = names([*project()["dependencies"], *extras["recipes"], *extras["hf"]])
    assert packages_of([*FILES, *RECIPES]) - FRAMEWORKS.keys() == declared
    importing = {
        (name, path)
        for path in FILES
        for name in FRAMEWORKS
        if any(each.split(".")[0] == name for each in imported(path))
    }
    assert importing
    assert all(path.relative_to(PACKAGE).as_posix().startswith(FRAMEWORKS[name]) for name, path in importing)


def test_library_and_rehearsals_import_only_required_packages() -> None:
    rooms = ("engine", "report", "rehearse", "null_cuda")
    files = [path for path in FILES if path.parent.name in rooms or path.parent == PACKAGE]
    required = names(project()["dependencies"])
    assert packages_of(files) - required == {"accelerate", "pytest"}  # to follow its launcher, and for pytest's plugin


def test_constraints_pin_allowed_versions_of_declared_packages() -> None:
    """A pinned version outside the declared range would make every installation under constraints fail."""
    from packaging.requirements import Requirement

    extras = [each for extra in project()["optional-dependencies"].values() for each in extra]
    wanted = {each.name.lower(): each for each in map(Requirement, [*project()["dependencies"], *extras])}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {pin.name.lower(): next(iter(pin.specifier)).version for pin in pins}
    assert {"torch", "transformers", "omegaconf"} <= set(pinned) & set(wanted)
    refused = {name for name in set(pinned) & set(wanted) if pinned[name] not in wanted[name].specifier}
    assert refused == set()
