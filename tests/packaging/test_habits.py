"""The workflow, hooks, changelog and make targets."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.smoke
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))


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


def test_make_targets_used_by_ci_exist() -> None:
    scripts = WORKFLOW.read_text(encoding="utf-8") + (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    made = set(re.findall(r"\bmake ([a-z-]+)$", scripts, re.MULTILINE))
    assert made == {"docs", "test"}
    assert made <= TARGETS
