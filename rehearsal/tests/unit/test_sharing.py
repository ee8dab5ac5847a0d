"""Ranks share imports and decisions of DTensor only where these are equal."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpu_rehearsal.processes import sharing


def product_on(rank: int) -> tuple[list[int], Any]:
    """Multiply sharded matrices as one of four ranks, in pairs. Return the pair and the placements of the result."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    whole = distribute_tensor(torch.ones(8, 8), mesh, [Replicate()])
    product = whole @ distribute_tensor(torch.ones(8, 8), mesh, [Shard(1)])
    pair = mesh.mesh.tolist()
    dist.destroy_process_group()
    return pair, product.placements


def test_rank_uses_the_shardings_of_another_on_its_own_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, computed = ShardingPropagator.propagate_op_sharding_non_cached, list[int]()

    def count(propagator: Any, schema: Any) -> Any:
        computed.append(dist.get_rank())
        return compute(propagator, schema)

    monkeypatch.setattr(ShardingPropagator, "propagate_op_sharding_non_cached", count)
    sharing.share_shardings(tmp_path)
    product_on(0)
    assert product_on(3) == ([2, 3], (Shard(1),))
    assert {*computed} == {0}


@pytest.mark.parametrize(
    ("library", "shared"),
    [
        ("x = 1", True),
        ("import os; os.environ.get('LOCAL_RANK')", False),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", False),
    ],
    ids=["harmless", "reads its rank", "starts a thread"],
)
def test_import_is_shared_unless_it_could_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, shared: bool
) -> None:
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "some_library.py").write_text(library)
    (tmp_path / "own.py").write_text("import some_library")
    (tmp_path / "train.py").write_text("from own import x")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    monkeypatch.setattr(sharing, "_INSTALLED", (str(tmp_path / "installed"),))
    if (child := os.fork()) == 0:
        sharing.share_imports(["torchrun", str(tmp_path / "train.py")])
        os._exit(10 + ("some_library" in sys.modules))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10 + shared
