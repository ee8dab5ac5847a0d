"""The scripts in the folder hangs, in real processes: bugs are found and explained, and nothing else is."""

import re
import shutil
import textwrap
from pathlib import Path

import pytest

from tests.conftest import Rehearse

SCRIPTS = Path(__file__).parent / "hangs"
BROKEN: dict[str, tuple[list[int], str]] = {
    "unused_parameters": ([0, 2, 3], "rank 1 used other parameters than its peers: pass find_unused_parameters=True"),
    "opposite_order": ([0, 1, 2, 3], "communicators in different orders"),
    "different_shapes": ([0, 2], "different numbers of elements: rank 0 .* of 4 float32, .* rank 1 .* of 5 float32"),
    "send_without_receive": ([0], "rank 0 sends a message, and rank 1 has no receive for it"),
    "early_break": ([0, 1, 3], r"rank 2 left the loop `for step in range\(4\)` at \S+ before rank 0: .* a break"),
}
"""For each broken script: ranks that wait, and the cause."""
CORRECT = [path.stem for path in sorted(SCRIPTS.glob("*.py")) if path.stem not in (*BROKEN, "setting")]
SMOKE = {"opposite_order", "asynchronous"}
ALL = [pytest.param(name, marks=[pytest.mark.smoke] if name in SMOKE else []) for name in (*BROKEN, *CORRECT)]


@pytest.mark.parametrize("name", ALL)
def test_script_hangs_if_it_is_broken(rehearse: Rehearse, tmp_path: Path, name: str) -> None:
    shutil.copy(SCRIPTS / "setting.py", tmp_path)
    source = (SCRIPTS / f"{name}.py").read_text()
    answer = rehearse(source, "--ranks", "4", "--together", "--steps", "0")
    found, hang = answer.found, answer.found["hang"]
    if name not in BROKEN:
        assert (answer.status, hang) == (0, None), (found, answer.printed)
        assert found["collectives"] > 0
        return
    ranks, cause = BROKEN[name]
    assert answer.status == 3, (found, answer.printed)
    assert re.search(cause, hang["cause"]), hang
    assert ranks in [each["ranks"] for each in hang["waits"]] or all(
        each["ranks"] == [rank] for rank, each in zip(ranks, hang["waits"], strict=True)
    ), hang
    marked = f"train.py:{next(at for at, line in enumerate(source.splitlines(), 1) if '# here' in line)}"
    assert marked in (*hang["waits"][0]["lines"], *hang["waits"][-1]["lines"]) or marked in hang["cause"], hang


PAGE = (Path(__file__).parents[1] / "docs" / "hangs.md").read_text()
EXAMPLE = "# train.py\n" + PAGE.partition("```python\n# train.py\n")[2].partition("```")[0]


@pytest.mark.smoke
def test_example_has_the_report_shown_on_its_page(rehearse: Rehearse) -> None:
    answer = rehearse(EXAMPLE, "--ranks", "4", "--together", json_format=False, status=3)
    assert textwrap.indent(answer.found.strip(), "    ") in PAGE


MIXED = """
    import torch, torch.distributed as dist

    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    on_gpus = torch.ones(1, dtype=torch.long, device="cuda")
    if rank == 0:
        dist.all_reduce(torch.ones(3))
    dist.all_reduce(on_gpus)
    print(on_gpus.item())
"""


def test_report_has_the_content_of_the_json_also_if_a_host_waits(rehearse: Rehearse) -> None:
    hang = rehearse(MIXED, "--ranks", "2", "--together", status=3).found["hang"]
    text = rehearse(MIXED, "--ranks", "2", "--together", json_format=False).found
    calls = {each["ranks"][0]: (each["call"], each["lines"][0]) for each in hang["waits"]}
    assert calls[0] == ("all_reduce of 3 float32 on hosts", "train.py:9")
    assert calls[1] == ("all_reduce of 1 int64, sum", "train.py:10")
    assert "in the branch `if rank == 0` at train.py:8" in hang["cause"]
    for each in (*hang["waits"], *hang["others"]):
        assert (each.get("call") or each["does"]) in text
        assert f"at {each['lines'][0]}: {each['source']}" in text
    assert f"likely cause: {hang['cause']}" in text


def test_group_with_ranks_that_do_not_run_is_compared_among_those_that_do(rehearse: Rehearse) -> None:
    answer = rehearse(EXAMPLE.replace("if rank == 0", "if rank == 6"), "--ranks", "8", "--together", "0,6", status=3)
    assert "in the branch `if rank == 6`" in answer.found["hang"]["cause"]
