"""Generates the tables of config keys in README.md and docs/ from the strings below the fields of the dataclasses.

python tools/keys.py             # rewrites the tables that differ
"""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from pathlib import Path

from torchtune_adaptive.config.keys import AdaptiveConfig, Settings, declared_settings

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TABLES = {"at the top": Settings, "under adaptive": AdaptiveConfig}
INCREASE = (
    "| `batch_increase_function` | null | grow the batch: a function `(epoch, batch_size)` that returns the rows to "
    "add at the beginning of an epoch. Give a dotted path, or a section with a `_component_` |"
)
"""Shown after `use_maximum_batch_size`; it is not a field of `Settings`."""
END = "<!-- end of keys -->"


def meanings_of(kind: type) -> dict[str, str]:
    """Return the string below each field, on one line. Only the source has these strings."""
    (section,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(section, ast.ClassDef)
    return {
        field.target.id: " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(section.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }


def begin(name: str) -> str:
    return f"<!-- keys {name}: made by tools/keys.py -->\n"


def table(section: type) -> str:
    """Return the table of the keys with a meaning. Keys of torchtune have none."""
    means = meanings_of(section)
    rows = [
        f"| `{option.name}` | {_default(option.default)} | {means[option.name]} |"
        for option in declared_settings(section)
        if option.name in means
    ]
    if section is Settings:
        rows.insert(1, INCREASE)
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _default(default: object) -> str:
    text = "null" if default is None else str(default)
    return text if text in ("null", "True", "False") or text.isdecimal() else f"`{text}`"


def renewed(text: str) -> str:
    """Return the page with regenerated tables."""
    for name, section in TABLES.items():
        if begin(name) in text:
            before, rest = text.split(begin(name))
            text = before + begin(name) + table(section) + END + rest.split(END, 1)[1]
    return text


def main() -> None:
    for page in PAGES:
        if (new := renewed(old := page.read_text(encoding="utf-8"))) != old:
            page.write_text(new, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
