"""Prints the size of both products, of their tests and of their pages, with the limits. Exit status 1 above a limit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_WORDS_OF_A_PAGE = 3_500


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def words(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


def main() -> int:
    pages = {path: words(path) for path in tracked("docs/*.md", "rehearsal/docs/*.md")}
    longest = max(pages, key=lambda page: pages[page])
    training = tracked("torchtune_adaptive/*.py", "recipes/*.py")
    sizes = [
        ("lines of the training package and recipes", lines(training), 16_000),
        ("lines of gpu_rehearsal", lines(tracked("rehearsal/gpu_rehearsal/*.py")), 7_500),
        ("lines of tests", lines(tracked("tests/*.py", "rehearsal/tests/*.py")), 25_000),
        ("words of docs", sum(pages.values()), 29_000),
        (f"words of the longest page, {longest.relative_to(ROOT)}", pages[longest], MOST_WORDS_OF_A_PAGE),
        ("lines of README.md", lines([ROOT / "README.md"]), 120),
        ("lines of rehearsal/README.md", lines([ROOT / "rehearsal" / "README.md"]), 100),
    ]
    for what, size, limit in sizes:
        print(f"{size:7,} of {limit:6,} {what}" + "  <- above the limit" * (size > limit))
    return int(any(size > limit for _, size, limit in sizes))


if __name__ == "__main__":
    sys.exit(main())
