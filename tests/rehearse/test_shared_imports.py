"""Rehearsals of one command import its libraries once."""

from pathlib import Path

import pytest

from tests.rehearse.conftest import Rehearse

SCRIPT = """
import library, torch
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group()
assert torch.cuda.device_count() == torch.distributed.get_world_size()
model = torch.nn.Linear(4096, 4096, device="cuda")
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LIBRARY = "import os, torch\nwith open(os.environ['LOG'], 'a') as log: log.write('imported\\n')\n"


def test_script_that_python_cannot_parse_has_no_answer(rehearse: Rehearse) -> None:
    answer = rehearse("def (", "--ranks", "1,2")
    assert [row["fits"] for row in answer.found] == [None, None]
    assert "SyntaxError" in answer.found[0]["verdict"]


@pytest.mark.parametrize(
    ("reads", "imports"),
    [
        ("assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)", 1),
        ("torch.ones(1, device='cuda')", 4),
    ],
)
def test_ranks_share_imports_unless_a_library_uses_cuda(
    reads: str, imports: int, rehearse: Rehearse, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "library.py").write_text(LIBRARY + reads)
    variables = {"PYTHONPATH": str(tmp_path / "lib"), "LOG": str(tmp_path / "log")}
    rows = rehearse(SCRIPT, "--ranks", "2,4,8", variables=variables).found
    assert len((tmp_path / "log").read_text().splitlines()) == imports
    alone = rehearse(SCRIPT, "--ranks", "4", variables=variables).found
    assert [row["fits"] for row in rows] == [True] * 3
    reserved = max(step["reserved_bytes"] for step in alone["steps"])
    assert (rows[1]["reserved_bytes"], rows[1]["seconds"]) == (reserved, alone["steps"][-1]["seconds"])
