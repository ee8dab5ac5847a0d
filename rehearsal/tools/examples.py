"""Write docs/examples.md from the cases in benchmarks/, their texts and their results.

python tools/examples.py    # in the folder rehearsal/; benchmarks/rehearse.sh repeats the rehearsals
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from gpu_rehearsal.ci.cases import read_cases

ROOT = Path(__file__).parent.parent
PAGE, CASES = ROOT / "docs" / "examples.md", ROOT / "benchmarks"
PROJECTS = ("trl", "transformers", "torchtitan")
ONLY_TEXT = ("transformers",)
"""Projects whose cases are only in the results."""
USUAL = "h100"
"""The GPU of most cases, which their names omit."""
MODEL = re.compile(r"--model_name_or_path (\S+)")
BATCH = re.compile(r"--per_device_train_batch_size (\d+)")
TEXT = """# Example scripts of other projects

These are [rehearsals](rehearsing.md) of unmodified example scripts of TRL, transformers and torchtitan.

The column *reserved* shows the peak of reserved memory. [A script](../benchmarks/rehearse.sh) fetches the
sources of a project and repeats its rehearsals:

    sh benchmarks/rehearse.sh trl ../trl > benchmarks/results/trl.json

"""


def page() -> str:
    """Return the text of docs/examples.md."""
    return TEXT + "\n".join(line for name in PROJECTS for line in section(CASES / f"{name}.toml"))


def section(file: Path) -> list[str]:
    """Return the section of a file of cases."""
    commands = {case.name: case.options["command"] for case in read_cases(file)}
    rows = json.loads((CASES / "results" / f"{file.stem}.json").read_text(encoding="utf-8"))
    text, _, missing = file.with_suffix(".md").read_text(encoding="utf-8").partition("\n---\n")
    lines = [text.format(cpu_s=sum(row["cpu_s"] for row in rows), count=len(rows)).strip(), ""]
    failed = [row["case"].rpartition(", ")[0] for row in rows if row["fits"] is None]
    end = [missing.strip().format(failed=", ".join(failed)), ""]
    if file.stem in ONLY_TEXT:
        return [*lines, *end]
    lines += ["| case | reserved |", "|---|---|"]
    for row in (row for row in rows if row["fits"] is not None and "debug" not in row["case"]):
        command = commands[row["case"]]
        about = [*MODEL.findall(command), *(f"batch of {size}" for size in BATCH.findall(command))]
        case = row["case"].removesuffix(f", {USUAL}") + f": {', '.join(about)}" * bool(about)
        reserved = f"{row['reserved_bytes'] / 2**30:.1f} GiB" if row["fits"] else "does not fit"
        lines.append(f"| {case} | {reserved} |")
    return [*lines, "", *end]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
