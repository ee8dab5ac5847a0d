"""One rehearsal: for numbers that decide nothing, and with `--once`; and jobs of too many ranks."""

from pathlib import Path

import pytest

from tests.conftest import Rehearse
from tests.scripts import lines_of

READS = """
    import torch

    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        rows = 4096 if model.weight.norm().item() > 1 else 8
        model(torch.zeros(rows, 1024, device="cuda")).sum().backward()
        optimizer.step()
"""


@pytest.mark.smoke
def test_one_rehearsal_is_enough_if_asked_for(rehearse: Rehearse) -> None:
    several, once = rehearse(READS, status=0).found, rehearse(READS, "--once", status=0).found
    (place,) = several["places_read"]
    assert once["untried"] == [place]
    assert f"other values were not tried at {place}" in once["verdict"]
    assert (several["untried"], once["tried"]) == ([], [])
    assert several["guesses"] == [place]


def test_more_ranks_than_any_job_has_are_refused(rehearse: Rehearse) -> None:
    for words in (("--ranks", "1000000000"), ()):
        launcher = () if words else ("torchrun", "--nnodes", "125000000", "--nproc_per_node", "8")
        answer = rehearse(READS, *words, command=(*launcher, "train.py"), json_format=False, status=2)
        assert "1,000,000,000 ranks are too many: rehearse up to 100,000" in answer.printed + answer.found


NUMBER = """
    import copy, json, logging, math, pickle
    import numpy as np
    import torch

    open("runs", "a").write("x")
    logger = logging.getLogger()
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    losses, total = [], 0.0
    for _ in range(3):
        loss = model(torch.randn(8, 1024, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        value, x = loss.item(), torch.zeros(8, 1024, device="cuda")
        {use}
"""


def runs_of(rehearse: Rehearse, folder: Path, use: str) -> tuple[int, list[int]]:
    """Return how often a script with this use of a number was rehearsed, and the lines on which memory depends."""
    found = rehearse(NUMBER.format(use=use), "--ranks", "2", status=0).found
    return len((folder / "runs").read_text()), lines_of(found["guesses"])


@pytest.mark.parametrize(
    "use",
    [
        "total += 8 * value / 3; losses.append(value); print(f'{total:.2f} {round(value, 2)}', sum(losses) / 3)",
        "logger.error('%.3f', value); print('%.3f' % -value, np.mean([value, value]), isinstance(value, float))",
        "print(float(loss), loss, f'{loss:.3f}', loss.tolist()); logger.error(f'{float(loss)}')",
        "pickle.dumps(value); total += copy.deepcopy({'loss': value})['loss']",
        "assert value < 1e4\n        if total > 1e4:\n            raise ValueError('diverges')",
    ],
    ids=["averaged", "logged", "printed at once", "copied", "only raises"],
)
@pytest.mark.smoke("averaged")
def test_number_that_decides_nothing_needs_one_rehearsal(rehearse: Rehearse, tmp_path: Path, use: str) -> None:
    assert runs_of(rehearse, tmp_path, use) == (1, [])


ROWS = "model(torch.zeros({rows}, 1024, device='cuda')).sum().backward()"


@pytest.mark.parametrize(
    "rows",
    [
        "2**19 if sum([value, value]) / 2 > 0.5 else 8",
        "8 + int(2**18 * value)",
        "8 + round(2**18 * value)",
        "8 + math.ceil(2**18 * math.sqrt(abs(value)))",
        "8 + math.ceil(2**18 * torch.tensor([abs(value)]).max())",
        "2**19 if (torch.ones(4) * value).max() > 0.5 else 8",
        "2**19 if np.max(np.array([value])) > 0.5 else 8",
        "8 + int(2**18 * json.loads(json.dumps(value)))",
        "2**19 if pickle.loads(pickle.dumps(value)) > 0.5 else 8",
        "8 + int(2**18 * float(loss))",
        "8 if value else 2**19",
    ],
    ids=lambda rows: rows[:30],
)
def test_number_that_decides_a_size_leads_to_further_rehearsals(rehearse: Rehearse, tmp_path: Path, rows: str) -> None:
    runs, lines = runs_of(rehearse, tmp_path, ROWS.format(rows=rows))
    assert (runs > 1, len(lines)) == (True, 1)
