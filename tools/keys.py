"""Writes the tables of keys into README.md, or the page of docs/ that has their place, from what each says of itself.

python tools/keys.py             # writes what has drifted
"""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from pathlib import Path

from torchtune_adaptive.config.keys import AdaptiveConfig, Settings, options_of
from torchtune_adaptive.forecast.keys import PlanSettings

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TABLES = {"at the top": Settings, "under adaptive": AdaptiveConfig, "of adaptive_plan": PlanSettings}
INCREASE = (
    "| `batch_increase_function` | null | a function (epoch, batch size[, measured]) -> rows to add, called before "
    "each epoch: a section with a `_component_`, or a dotted path |"
)
"""Its place is below the key of the search; no dataclass has it."""
END = "<!-- end of keys -->"


def meanings_of(kind: type) -> dict[str, str]:
    """What the string below each field says, without its line breaks; only the source has it."""
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
    """The keys that say what they mean: torchtune's own do not."""
    means = meanings_of(section)
    rows = [
        f"| `{option.name}` | {_default(option.default)} | {means[option.name]} |"
        for option in options_of(section)
        if option.name in means
    ]
    if section is Settings:
        rows.insert(1, INCREASE)
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _default(default: object) -> str:
    text = "null" if default is None else str(default)
    return text if text in ("null", "True", "False") or text.isdecimal() else f"`{text}`"


def renewed(text: str) -> str:
    """A page, with its tables made anew."""
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
