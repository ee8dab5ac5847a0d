"""Commands and links in README and docs/ are valid.

These tests do not train: they read the settings of configs as a run does, and run only commands that print a result.
"""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from gpu_rehearsal.command import parser_of_command
from torch.distributed.run import get_args_parser

from tests.unit.config.test_config import READERS
from torchtune_adaptive.cli.main import main, parse
from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.command_line import read_config
from torchtune_adaptive.config.registry import FULL, PPO, RECIPES, config_files, our_configs, recipe_files
from torchtune_adaptive.rl.settings import PPO_KEYS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.smoke
HISTORY = {"decisions.md", "CHANGELOG.md"}
"""These pages name commands that no longer exist."""
ALL_PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in ALL_PAGES if page.name not in HISTORY]
ON_THE_SITE = ("docs", "examples", "benchmarks", "rehearsal")
"""Folders that `make docs` copies."""
PROGRAMS = ("tune", "tune-adaptive", "rehearse", "make", "python", "torchrun", "pip")
MINE = "mine.yaml"
"""Name of a reader's config in commands."""
_STARTS = re.compile(rf"(?:^|[\s(])((?:{'|'.join(PROGRAMS)}) .*)")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.MULTILINE)


class Shown(NamedTuple):
    page: Path
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}: {self.text}"

    @property
    def words(self) -> list[str]:
        try:
            return shlex.split(self.text, comments=True)
        except ValueError:  # prose with an apostrophe
            return []


def code_of(text: str) -> Iterator[str]:
    """Yield lines of fenced or indented blocks, with continuation lines joined; then inline code."""
    fenced = re.compile(r"^```[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    blocks = [*fenced.findall(text), *re.findall(r"(?:^ {4}.*\n)+", text := fenced.sub("", text), re.MULTILINE)]
    for block in blocks:
        yield from re.sub(r" *\\\n *", " ", block).splitlines()
    prose = (line for line in text.splitlines() if not line.startswith("    "))
    yield from (code for line in prose for code in re.findall(r"`([^`]+)`", line))


def commands_of(page: Path) -> Iterator[Shown]:
    for line in code_of(page.read_text(encoding="utf-8")):
        found = _STARTS.search(line.strip().removeprefix("$ "))
        if found and "..." not in found[1] and not line.strip().startswith("#"):
            yield Shown(page, found[1].strip())


def files_of(page: Path) -> dict[str, str]:
    """Return the blocks whose first line is a comment with the name of a file, by that name."""
    return dict(
        re.findall(r"^```\w+\n# ([\w.]+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )


COMMANDS = [shown for page in PAGES for shown in commands_of(page)]


def those_of(program: str, *first: str) -> list[Shown]:
    begin = [program, *first]
    return [shown for shown in COMMANDS if shown.words[: len(begin)] == begin and len(shown.words) > len(begin)]


RUNS = those_of("tune", "run")
for path in sorted((ROOT / "examples" / "launchers").glob("*.yaml")):
    joined = re.sub(r" *\\\n *", " ", path.read_text(encoding="utf-8"))
    RUNS += [Shown(path, found.removesuffix(" &")) for found in re.findall(r"^ +(tune run .*)$", joined, re.MULTILINE)]
ANSWERS = those_of("tune-adaptive")


def test_commands_of_the_readme_are_found() -> None:
    assert len(RUNS) >= 7
    assert len(ANSWERS) >= 6
    assert any("--rdzv_endpoint" in shown.text and "use_maximum_batch_size=True" in shown.text for shown in RUNS)
    assert {"make demo", "make test", "make crash"} <= {" ".join(shown.words) for shown in those_of("make")}
    assert list(code_of("a `b c` d\n\n    e \\\n      f\n\n```sh\ng\n```\n")) == ["g", "    e f", "b c"]


@pytest.fixture
def readers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a reader's config and recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / MINE).write_bytes(config_files()["adaptive/llama3_2/1B_full"].read_bytes())
    (tmp_path / "mine.py").write_bytes(recipe_files()[FULL].read_bytes())
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.mark.parametrize("shown", RUNS, ids=str)
def test_shown_run_would_start(shown: Shown, readers_folder: Path) -> None:
    options = get_args_parser().parse_args(shown.words[2:])  # torchrun's parser exits at an unknown flag
    recipe, (flag, name, *overrides) = options.training_script, options.training_script_args
    assert flag == "--config"
    for file, text in files_of(shown.page).items():
        Path(file).write_text(text)
    path = config_files().get(name) or Path(name)
    cfg = read_config(path, [*overrides, "output_dir=out"])
    named = FULL if recipe == "mine.py" else recipe
    check_keys(cfg, PPO_KEYS if named == PPO else (), log=False)
    assert READERS[named](cfg)


@pytest.mark.parametrize("shown", ANSWERS, ids=str)
def test_shown_command_prints_a_result(shown: Shown, readers_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shown.words[1:]
    if words[0] == "cp":
        for path in readers_folder.iterdir():
            path.unlink()
    if len(words) == 1 and words[0] != "ls":  # the command's name in a sentence
        words.append("--help")
    elif words[0] == "status":  # only the reader has a run
        assert parse(words).run
        return
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 0, capsys.readouterr().err


def test_shown_rehearsals_have_valid_options() -> None:
    shown = those_of("rehearse")
    assert len(shown) >= 2
    assert all(parser_of_command().parse_args(each.words[1:]) for each in shown)


def test_shown_make_targets_exist() -> None:
    for each in those_of("make"):
        folder, words = (each.words[2], each.words[3:]) if each.words[1] == "-C" else (".", each.words[1:])
        (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / folder / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words if "=" not in word} - set(phony.split()) == set()


@pytest.mark.parametrize("shown", [*those_of("python"), *those_of("torchrun")], ids=str)
def test_shown_programs_exist(shown: Shown) -> None:
    words = shown.words[1:]
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None
        return
    scripts = [word for word in words if word.endswith(".py")]
    assert scripts
    assert all((ROOT / script).is_file() or script in files_of(shown.page) for script in scripts)


def test_python_files_named_on_pages_exist() -> None:
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`(?:[^`]* )?((?:\w+/)+\w+\.py)", page.read_text(encoding="utf-8"))
    }
    assert {"engine/step.py", "tools/keys.py"} <= named
    places = (ROOT, ROOT / "torchtune_adaptive")
    assert {name for name in named if not any((place / name).is_file() for place in places)} == set()


def test_shown_extras_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    lists = [extras for shown in those_of("pip") for extras in re.findall(r"\.\[([\w,-]+)\]", shown.text)]
    extras = {extra for each in lists for extra in each.split(",")}
    assert {"recipes", "hf"} <= extras
    assert {extra for extra in extras if not re.search(rf"^{extra} = \[", project, re.MULTILINE)} == set()


def test_config_files_show_a_valid_start_command() -> None:
    for name, path in ((config.name, config.path) for config in our_configs()):
        (line,) = re.findall(r"^#\s+tune run (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        options = get_args_parser().parse_args(line.split())
        assert options.training_script in RECIPES, name
        assert options.training_script_args == ["--config", name]


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub generates for headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links_of(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return ["".join(groups) for groups in _LINK.findall(text)]


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_links_lead_to_existing_files_and_headings(page: Path) -> None:
    for link in links_of(page):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), link
        within = target.relative_to(ROOT).parts
        assert len(within) <= 1 or within[0] in ON_THE_SITE, link
        assert not anchor or anchor in anchors_of(target), link


def test_every_page_of_docs_is_linked() -> None:
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links_of(page)}
    assert set((ROOT / "docs").glob("*.md")) - linked == set()
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in contents] == []


def test_reference_links_are_defined_and_used() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        defined = set(re.findall(r"^\[([^\]]+)\]: ", text, re.MULTILINE))
        used = set(re.findall(r"\]\[([^\]]+)\]", text)) | {each for each in defined if f"[{each}]" in text}
        assert used <= defined, page.name
        assert all(len(re.findall(rf"\[{re.escape(each)}\]", text)) > 1 for each in defined), page.name
