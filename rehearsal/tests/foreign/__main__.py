"""Rehearse every script in tests/foreign/scripts; write the summary of docs/measured.md.

A script states in its comments how it is rehearsed and what must come out:

    # command: --ranks 8 -- torchrun SCRIPT    options and command (default: `-- SCRIPT`)
    # bytes: 8.03e9 * 16 / 8                   weights, gradients and optimizer state: the peak is at least this
    # at most: 2                               and at most this multiple (default: 1.25)

A script with several commands is rehearsed once with each, and each has its own bytes.

`python -m tests.foreign [name ...]` exits with 1 if a script gives another answer.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "foreign.json"
PAGE = ROOT / "docs" / "measured.md"
BEGIN, END = "<!-- made by tests/foreign -->\n", "<!-- end of tests/foreign -->\n"
LIBRARIES = (
    "torch", "transformers", "accelerate", "trl", "peft", "bitsandbytes", "deepspeed", "liger-kernel", "lightning",
    "torchvision", "torchao", "torch-geometric",
)  # fmt: skip
GIB = 2**30
LIMIT_S = 300


class Found(NamedTuple):
    """The outcome of one script; `wrong` states how it differs from what the script expects."""

    script: str
    what: str
    verdict: str
    arithmetic_gib: float | None
    peak_gib: float | None
    cpu_s: float
    wrong: str


def declared(text: str, key: str, default: str = "") -> str:
    """Return what a script's comment states under this key."""
    found = re.search(rf"^# {key}:? ?(.*)$", text, re.MULTILINE)
    return found[1] if found else default


class Case(NamedTuple):
    """A script, and the comments about one of its commands."""

    script: Path
    about: str
    argument: str
    """The last word of the command if there are several, else empty."""


def cases_of(script: Path) -> list[Case]:
    """Return a case for each command of a script."""
    text = script.read_text()
    several = re.split(r"(?=^# command:)", text, flags=re.MULTILINE)[1:]
    if len(several) < 2:
        return [Case(script, text, "")]
    return [Case(script, about, declared(about, "command").split()[-1]) for about in several]


def rehearse(case: Case) -> Found:
    """Rehearse a script in an empty folder, as a user would."""
    command = declared(case.about, "command", "-- SCRIPT").split()
    words = [str(case.script) if word == "SCRIPT" else word for word in command]
    program = [str(Path(sys.executable).with_name("rehearse")), "--steps", "3", "--format", "json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [*program, *words], cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            printed, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, errors = process.communicate()
            errors += f"\nno answer within {LIMIT_S} s"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return judge(case, printed, errors, round(cpu_s, 1))


def judge(case: Case, printed: str, errors: str, cpu_s: float) -> Found:
    """Compare the answer with what the script's comments expect."""
    answer = json.loads(printed) if printed.startswith("{") else {}
    verdict = answer.get("verdict") or (errors.strip().splitlines() or ["no answer"])[-1]
    verdict = re.sub(r"/[^ ,]*/(site-packages|scripts|gpu_rehearsal)/", r"\1/", verdict)
    steps = [*answer.get("steps", ()), answer.get("after_last_step")]
    peak = max((step["allocated_bytes"] for step in steps if step), default=0)
    least = eval(declared(case.about, "bytes", "0"))
    most = float(declared(case.about, "at most", "1.25"))
    wrong = ""
    if not answer.get("fits"):
        wrong = "no answer" if not answer.get("out_of_memory") else "does not fit"
    elif not least <= peak <= most * least:
        wrong = f"the peak is {peak / least:.2f} times the expected bytes, not 1 to {most}"
    what = case.script.read_text().split('"""')[1].strip().rstrip(".")
    name, what = (f"{text} {case.argument}".rstrip() for text in (case.script.stem, what))
    return Found(name, what, verdict, least / GIB, peak / GIB, cpu_s, wrong)


def versions() -> dict[str, str]:
    """Return the versions of the libraries."""
    return {name: version(name) for name in LIBRARIES}


def summary(results: list[Found]) -> str:
    """Return the text for docs/measured.md."""
    ratios = [each.peak_gib / each.arithmetic_gib for each in results if each.arithmetic_gib and each.peak_gib]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} times the sum (median {median(ratios):.2f})"
    used = ", ".join(f"{name} {number}" for name, number in versions().items())
    return f"The rehearsed peaks of {len(ratios)} scripts are {spread}, with {used}.\n"


def main() -> None:
    """Rehearse the named scripts, or all and write the summary."""
    scripts = sorted(path for path in (HERE / "scripts").glob("*.py") if path.stem != "models")
    every = [case for script in scripts for case in cases_of(script)]
    named = [*scripts, *(HERE / "own_environment").glob("*.py")]
    chosen = [case for script in named if script.stem in sys.argv[1:] for case in cases_of(script)] or every
    results = []
    with ProcessPoolExecutor(int(os.environ.get("WORKERS", "2"))) as pool:
        for found in pool.map(rehearse, chosen):
            status = f"WRONG: {found.wrong}" if found.wrong else "ok"
            sizes = f"{found.arithmetic_gib:7.2f} {found.peak_gib:7.2f} GiB"
            print(f"{found.script:27} {found.cpu_s:6.1f} s {sizes}  {status}\n    {found.verdict}", flush=True)
            results.append(found)
    if len(chosen) == len(every):
        record = {"versions": versions(), "scripts": [found._asdict() for found in results]}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(before + BEGIN + summary(results) + END + rest.partition(END)[2])
    sys.exit(any(found.wrong for found in results))


if __name__ == "__main__":
    main()
