"""Run tests with every supported version of torch and write the table of CONTRIBUTING.md.

make versions                            # makes the environments, then
python -m tools.versions 2.13.0 2.14.1   # these, each in .venv/torch-VERSION, and the torch of this environment
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- versions: made by tools/versions.py -->\n", "<!-- end of versions -->"
GROUPS = {
    "attention without padding": "tests.unit.tune.test_unpadded",
    "engine and parts of recipes": "tests.unit",
    "ledger, faults, sharding on 2 to 4 ranks": "tests.distributed",
    "recipes": "tests.recipes",
}
"""Column of the table -> prefix of test modules. A test counts in the first column that matches."""
UNIT = ("test_private_names.py", "engine", "tune")
SELECTED = ((*(f"tests/unit/{room}" for room in UNIT), "tests/distributed"), ("-m", "smoke", "tests/recipes"))
"""Arguments of two runs of pytest."""
MOST_MINUTES = 40
"""For each of the two runs."""


def run(python: Path, workers: int) -> tuple[dict[str, Counter[str]], float]:
    """Run the tests in this environment; return their outcomes by group and the minutes they took."""
    found: dict[str, Counter[str]] = {group: Counter() for group in GROUPS}
    began = time.monotonic()
    for selected in SELECTED:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [
                str(python),
                "-W",
                "ignore",
                "-m",
                "pytest",
                "-q",
                "--no-header",
                f"--junitxml={report}",
                *selected,
            ]
            parallel = [f"--numprocesses={workers}", "--dist=loadfile", "--no-loadscope-reorder"]
            subprocess.run([*command, *parallel], cwd=ROOT, timeout=60 * MOST_MINUTES, check=False)
            for group, counts in outcomes(ElementTree.parse(report)).items():
                found[group] += counts
    return found, (time.monotonic() - began) / 60


def outcomes(report: ElementTree.ElementTree[ElementTree.Element]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {group: Counter() for group in GROUPS}
    for case in report.iter("testcase"):
        group = next((name for name, at in GROUPS.items() if case.get("classname", "").startswith(at)), None)
        how = {child.tag for child in case} & {"failure", "error", "skipped"}
        if group is not None:
            found[group]["passed" if not how else "skipped" if how == {"skipped"} else "failed"] += 1
    return found


def row(version: str, found: dict[str, Counter[str]], minutes: float) -> str:
    def cell(counts: Counter[str]) -> str:
        failed = f", **{counts['failed']} failed**" if counts["failed"] else ""
        return f"{counts['passed']} passed{failed}"

    return f"| {version} | {' | '.join(cell(found[group]) for group in GROUPS)} | {minutes:.0f} |"


def main(versions: list[str]) -> int:
    pythons = {each: ROOT / ".venv" / f"torch-{each}" / "bin" / "python" for each in versions}
    pythons[torch.__version__.split("+")[0]] = Path(sys.executable)
    rows, failed = [], 0
    for version, python in pythons.items():
        found, minutes = run(python, workers=2)
        rows.append(row(version, found, minutes))
        failed += sum(counts["failed"] for counts in found.values()) or not found["recipes"]["passed"]
        print(rows[-1], flush=True)
    head = f"| torch | {' | '.join(GROUPS)} | minutes |"
    table = "\n".join([head, "|" + "---|" * (len(GROUPS) + 2), *rows])
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
