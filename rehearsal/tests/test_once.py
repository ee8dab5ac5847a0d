"""`--once`: one rehearsal, which names the reads that were not tried with other values; and jobs of too many ranks."""

import pytest

from tests.conftest import Rehearse

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
