"""No rehearsal predicts too little memory without a warning: scripts whose memory depends on computed values.

`python -m tests.test_corpus [NAME ...]` prints the peaks and warnings of these scripts as a table.
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Rehearse, run_program

CORPUS = Path(__file__).with_name("corpus.py")
SOURCES = {
    each.name: each
    for each in ast.parse(CORPUS.read_text()).body
    if isinstance(each, ast.FunctionDef) and [argument.arg for argument in each.args.args] == ["step"]
}
LATER = "evaluation_later"
"""A script whose memory does not depend on values, and grows in step 20."""


def rehearse_script(name: str, *options: str, **variables: str) -> dict[str, Any]:
    command = (str(CORPUS), name, "25" if name == LATER else "3")
    words = ("rehearse", "--format", "json", *options, "--", *command)
    answer = run_program(CORPUS.parent, *words, **variables)
    found: dict[str, Any] = json.loads(answer.stdout)
    assert found["fits"], answer.stderr
    return found


def peak_of(found: dict[str, Any]) -> int:
    return max(each["allocated_bytes"] for each in (*found["steps"], found["after_last_step"]))


def marked_lines(name: str) -> set[int]:
    """Return the lines that read a value of the GPU on which memory depends."""
    first, last = SOURCES[name].lineno, SOURCES[name].end_lineno
    lines = CORPUS.read_text().splitlines()[:last]
    return {number for number, line in enumerate(lines, 1) if number > first and line.endswith("# here")}


def named_lines(found: dict[str, Any]) -> set[int]:
    """Return the lines of the script that the report names."""
    return {int(each.rpartition(":")[2]) for each in found["guesses"] if each.startswith(str(CORPUS))}


def print_row(name: str) -> None:
    """Print exact and rehearsed peak, the lines in the verdict, and the CPU seconds of the rehearsal with guesses."""
    exact = peak_of(rehearse_script(name, "--steps", "0", KNOWN="1"))
    found = rehearse_script(name)
    scope, lines = found["verdict"].partition(":")[0], sorted(named_lines(found))
    peaks = f"{exact / 2**20:.0f} | {peak_of(found) / 2**20:.0f}"
    print(f"| {name} | {peaks} | {scope} | {', '.join(map(str, lines))} | {found['cpu_s']:.1f} |", flush=True)


@pytest.mark.smoke("layer_drop")
@pytest.mark.parametrize("name", [each for each in SOURCES if each != LATER])
def test_too_low_a_peak_has_a_warning_with_its_line(name: str) -> None:
    exact, found = peak_of(rehearse_script(name, KNOWN="1")), rehearse_script(name)
    assert peak_of(found) >= exact or marked_lines(name) & named_lines(found)


def test_verdict_says_how_many_steps_it_covers() -> None:
    found, whole = rehearse_script(LATER), rehearse_script(LATER, "--steps", "0")
    assert peak_of(whole) > 1.02 * peak_of(found)
    assert found["verdict"].startswith("fits in the first 10 steps: ")
    assert whole["verdict"].startswith("fits: ")


def test_layer_drop_has_the_report_shown_on_the_page(rehearse: Rehearse) -> None:
    page = (CORPUS.parents[1] / "docs" / "values.md").read_text()
    (script,) = re.findall(r"```python\n(# train.py\n.*?)```", page, re.DOTALL)
    report = rehearse(script, json_format=False).found.splitlines()
    assert all(f"    {line}\n" in page for line in (report[0], *report[-3:]))


if __name__ == "__main__":
    print("| script | exact, MiB | rehearsed, MiB | verdict | named lines | CPU s |\n|---|---|---|---|---|---|")
    for each in sys.argv[1:] or sorted(SOURCES):
        print_row(each)
