"""After the rehearsed steps, a rehearsal looks whether a later batch of the script's data is larger."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import Rehearse

DATA = """
import sys, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

LENGTHS = [64 if at != 23 else 4096 for at in range(400)]

class Samples(Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, at):
        return torch.zeros(LENGTHS[at], dtype=torch.long)

class Stream(IterableDataset):
    def __iter__(self):
        return (torch.zeros(each, dtype=torch.long) for each in LENGTHS)

class Broken(Samples):
    def __getitem__(self, at):
        if at == 17:
            raise OSError("a file is missing")
        return super().__getitem__(at)

class Slow(Samples):
    def __getitem__(self, at):
        if at == 17:
            import time
            time.sleep(600)
        return super().__getitem__(at)
"""
TRAIN = """
words = torch.nn.Embedding(100, 64, device="cuda")
optimizer = torch.optim.SGD(words.parameters())
for batch in loader:
    words(batch.cuda()).sum().backward()
    optimizer.step()
"""
LOADERS = {
    "a map-style dataset": "DataLoader(Samples())",
    "an iterable dataset": "DataLoader(Stream())",
    "workers": "DataLoader(Samples(), num_workers=2, pin_memory=True)",
    "a stateful loader": "StatefulDataLoader(Samples())",
}


def script(loader: str) -> str:
    stateful = "from torchdata.stateful_dataloader import StatefulDataLoader\n" * ("Stateful" in loader)
    return f"{DATA}{stateful}loader = {loader}\n{TRAIN}"


@pytest.mark.smoke("a map-style dataset")
@pytest.mark.parametrize("case", LOADERS)
def test_larger_later_batch_is_named_with_the_steps_that_reach_it(case: str, rehearse: Rehearse) -> None:
    loader = LOADERS[case]
    answer = rehearse(script(loader), status=0)
    remedy = answer.found["later_batch"]["steps"]
    assert "; batch 24 has 4,096 elements, earlier ones at most 64 " in answer.found["verdict"]
    assert f"--steps {remedy} rehearses it" in answer.found["verdict"]
    if case == "workers":
        reached = rehearse(script(loader), "--steps", str(remedy)).found
        assert reached["later_batch"] == {}
        assert reached["steps"][-1]["allocated_bytes"] > answer.found["steps"][-1]["allocated_bytes"]


@pytest.mark.parametrize(
    ("pattern", "steps"),
    [("for _ in range(2):\n        optimizer.step()", 48), ("if at % 2:\n        optimizer.step()", 12)],
    ids=["two steps per batch", "two batches per step"],
)
def test_steps_that_reach_a_batch_depend_on_the_batches_of_a_step(pattern: str, steps: int, rehearse: Rehearse) -> None:
    several = script("DataLoader(Samples())").replace("for batch in", "for at, batch in enumerate")
    answer = rehearse(several.replace("loader:", "(loader):").replace("optimizer.step()", pattern))
    assert (answer.status, answer.found["later_batch"]["steps"]) == (0, steps), answer.printed


@pytest.mark.parametrize(("growth", "expected"), [(2, {"first": 128, "last": 512}), (1.05, {})])
def test_batches_that_grow_in_each_epoch_are_reported(
    growth: float, expected: dict[str, int], rehearse: Rehearse
) -> None:
    epochs = (
        f"(batch for epoch in range(9) for batch in DataLoader(torch.zeros(8, int(64 * {growth}**epoch)).long(), 2))"
    )
    found = rehearse(script(epochs), status=0).found
    assert found["later_batch"] == expected
    assert ("batches grow each time that the data starts again (128 to 512" in found["verdict"]) == bool(expected)


@pytest.mark.parametrize("after", ["an error", "the end", "a wait"])
def test_data_without_a_larger_batch_is_no_remark_and_no_error(after: str, rehearse: Rehearse) -> None:
    """Also if the data fails or never comes, which ends only the look."""
    loader = {"an error": "DataLoader(Broken())", "the end": "DataLoader(Samples())", "a wait": "DataLoader(Slow())"}
    found = script(loader[after]).replace("400", "17" if after == "the end" else "400")
    patch = "from gpu_rehearsal.recording import later_batches\nlater_batches.MOST_S = 1\n" * (after == "a wait")
    answer = rehearse(patch + found)
    assert (answer.status, answer.found["later_batch"]) == (0, {}), answer.printed
    assert len(answer.found["steps"]) == 10


def test_workers_of_a_loader_end_with_the_rehearsal(rehearse: Rehearse, tmp_path: Path) -> None:
    noted = """
def note(_):
    import atexit, os
    from multiprocessing.util import Finalize
    Finalize(None, open(f"ended {os.getpid()}", "w").close, exitpriority=1)
"""
    loader = "DataLoader(Samples(), num_workers=2, worker_init_fn=note)"
    rehearse(script(loader).replace("\nloader =", f"{noted}\nloader ="), status=0)
    assert len(list(tmp_path.glob("ended *"))) == 2


@pytest.mark.smoke
def test_elements_are_those_of_tensors_in_lists_dictionaries_and_objects_that_move_to_a_device() -> None:
    from gpu_rehearsal.recording.later_batches import elements_of

    graph = SimpleNamespace(x=torch.zeros(3, 4), parts=[torch.zeros(2), {"y": torch.zeros(5)}], to=None, name="graph")
    assert elements_of(graph) == 19
    assert elements_of(["a", 1, None, SimpleNamespace(x=torch.zeros(3))]) == 0
