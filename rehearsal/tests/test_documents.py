"""README and docs/: links lead somewhere, shown commands are valid, named files exist."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from gpu_rehearsal.command import parser_of_command

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
pytestmark = pytest.mark.smoke
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)
_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^ {4}(?:\$ )?rehearse (.*)$", re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_existing_files_and_headings(page: Path) -> None:
    links = ["".join(groups) for groups in _LINK.findall(_FENCED.sub("", page.read_text()))]
    for link in (link for link in links if not link.startswith("https://")):
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_every_page_is_listed() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in listed] == ["README.md"]


def shown_commands() -> list[tuple[Path, list[str]]]:
    texts = ((page, page.read_text().replace("\\\n", "")) for page in PAGES)
    return [(page, shlex.split(words, comments=True)) for page, text in texts for words in _COMMAND.findall(text)]


def test_shown_commands_are_valid() -> None:
    shown = shown_commands()
    assert len(shown) > 12
    for page, words in shown:
        options = parser_of_command().parse_args(words)
        scripts = [word for word in options.words if word.startswith("examples/")]
        assert all((ROOT / script).is_file() for script in scripts), page


def test_options_of_the_table_are_those_of_the_command() -> None:
    page = (ROOT / "docs" / "rehearsing.md").read_text()
    documented = {
        name for row in re.findall(r"^\| (`--.*?) \|", page, re.MULTILINE) for name in re.findall("--[a-z-]+", row)
    }
    known = {name for action in parser_of_command()._actions for name in action.option_strings}
    assert documented == known - {"-h", "--help", "--version"}


def test_named_files_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    named |= {name for page in PAGES for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text())}
    assert {"repeating.py", "gpu_rehearsal/gpus.py"} <= named
    places = (ROOT, ROOT / "gpu_rehearsal")
    assert {name for name in named if not any((place / name).is_file() for place in places)} == set()


def test_shown_settings_are_toml() -> None:
    for page in PAGES:
        for block in re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            assert tomllib.loads(block)
