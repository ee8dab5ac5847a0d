"""State copied by a background save, and its cost for training."""

import errno
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.optim import AdamW8bit

from torchtune_adaptive.checkpoints.manager import BackgroundSave, Written, copy_of
from torchtune_adaptive.engine.memory import plain_tensors

COPIES = ("copy_", "clone", "_to_copy")


class Copied(TorchDispatchMode):
    """Counts the bytes copied while active."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in COPIES:
            self.bytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def trained(optimizer_type: type[torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(64, 128)
    fully_shard(model)
    optimizer = optimizer_type(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


def of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seen": [3]}


def flat(state: object) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(state)
    return [plain for leaf in leaves if isinstance(leaf, Tensor) for plain in plain_tensors(leaf)]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("optimizer_type", [torch.optim.AdamW, AdamW8bit])
def test_background_save_contains_the_state_before_training_continues(
    optimizer_type: type[torch.optim.Optimizer],
) -> None:
    model, optimizer = trained(optimizer_type)
    state = of(model, optimizer)
    staged = copy_of(state)
    weight, copied = state["model"]["weight"], staged["model"]["weight"]
    assert isinstance(copied, DTensor)
    assert (copied.placements, copied.device_mesh) == (weight.placements, weight.device_mesh)
    before = [plain.clone() for plain in flat(staged)]
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    state["seen"].append(4)
    assert staged["seen"] == [3]
    assert not torch.equal(flat(state)[0], before[0])
    for kept, was in zip(flat(staged), before, strict=True):
        assert torch.equal(kept, was)


@pytest.mark.usefixtures("one_rank")
def test_training_waits_for_one_copy_of_its_state() -> None:
    state = of(*trained(torch.optim.AdamW))
    with Copied() as copied:
        copy_of(state)
    assert copied.bytes == sum(plain.numel() * plain.element_size() for plain in flat(state))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("failing", range(3))
def test_save_reports_an_error_or_is_complete(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torch writes a rank's parts in several threads, and checks only one of them for errors."""
    opened: list[Path] = []
    create_stream = FileSystem.create_stream

    def on_a_full_disk(system: FileSystem, path: Path, mode: str) -> AbstractContextManager[Any]:
        opened.append(path)
        if len(opened) - 1 == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create_stream(system, path, mode)

    monkeypatch.setattr(FileSystem, "create_stream", on_a_full_disk)
    state = copy_of(of(*trained(torch.optim.AdamW)))
    published: list[str] = []
    save = BackgroundSave(lambda written: published.append(written.name))
    save.start(tmp_path, state, Written("step_1", None, []))  # type: ignore[arg-type]
    error = save.wait()
    monkeypatch.undo()
    if error is None:
        found = FileSystemReader(tmp_path).read_metadata()
        assert {index.fqn for index in found.storage_data} == set(found.state_dict_metadata)
    else:
        assert "No space left on device" in str(error)
    assert published == ["step_1"] * (error is None)
    assert (error is None) == (len(opened) <= failing)
    assert capfd.readouterr().err == ""
