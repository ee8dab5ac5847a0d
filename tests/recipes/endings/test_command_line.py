"""README's `tune run`, from a directory without files of this project."""

import re
from pathlib import Path

import pytest

from tests.recipes.running import tune_run

ROOT = Path(__file__).parents[3]
TORCHAOS_NOTICE = "Skipping import of cpp extensions"
"""`tune` itself prints it, before any code of ours runs."""
NOISE = re.compile(
    r"warning|deprecat|cpp extensions|set_vital|pin_memory|destroy_process_group|NCCL|OMP_NUM_THREADS", re.IGNORECASE
)


@pytest.mark.smoke
def test_command_prints_the_lines_that_readme_shows_and_nothing_like_a_problem(tmp_path: Path) -> None:
    """Losses are compared to one digit, because later ones differ between CPUs.

    Any step on any rank can be the first to run out of memory: step 4 peaks 0.3 MiB below the limit, and gloo may hold
    a gathered layer a moment longer.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [(command, block)] = re.findall(r"^    \$ tune run (.+)\n((?:    .+\n)+)", text, re.MULTILINE)
    launcher, number, recipe, *config = command.split()
    assert (launcher, number) == ("--nproc_per_node", "2")
    ended = tune_run(recipe, *config, ranks=2, cwd=tmp_path, timeout_s=180)
    assert ended.status == 0, ended.output
    seen = [_comparable(line).strip() for line in ended.output.splitlines()]
    shown = [_comparable(line.strip()) for line in block.splitlines()]
    assert len(shown) == 2
    assert [line for line in shown if line not in seen] == []
    assert "_component_" not in ended.output, "a screen of config"
    assert "\r" not in ended.output, "a progress bar, and lines that hang on it"
    assert [line for line in seen if NOISE.search(line) and not line.startswith(TORCHAOS_NOTICE)] == []


def _comparable(line: str) -> str:
    if "out of memory" in line:
        return re.sub(r"\d+", "N", line)
    return re.sub(r"\b(\d+\.\d)\d{3}\b", r"\1", line)
