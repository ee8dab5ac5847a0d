"""Writes the tables of keys into README.md, or the page of docs/ that has their place, from what each says of itself.

python tools/keys.py             # writes what has drifted
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torchtune_adaptive.cli.keys import Key, at_the_top, of_adaptive_plan, of_the_section

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TABLES = {"at the top": at_the_top, "under adaptive": of_the_section, "of adaptive_plan": of_adaptive_plan}
END = "<!-- end of keys -->"


def begin(name: str) -> str:
    return f"<!-- keys {name}: made by tools/keys.py -->\n"


def table(keys: Iterable[Key]) -> str:
    rows = [f"| `{key.name.removeprefix('adaptive.')}` | {_default(key.default)} | {key.means} |" for key in keys]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _default(default: str) -> str:
    return default if default in ("null", "True", "False") or default.isdecimal() else f"`{default}`"


def renewed(text: str) -> str:
    """A page, with its tables made anew."""
    for name, keys in TABLES.items():
        if begin(name) in text:
            before, rest = text.split(begin(name))
            text = before + begin(name) + table(keys()) + END + rest.split(END, 1)[1]
    return text


def main() -> None:
    for page in PAGES:
        if (new := renewed(old := page.read_text(encoding="utf-8"))) != old:
            page.write_text(new, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
