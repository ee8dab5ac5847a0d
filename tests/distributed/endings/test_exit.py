"""A process that trained on CPUs, or had already finished training, exits with status 0."""

import sys
from pathlib import Path

import pytest

from tests.recipes.running import run_command

BUSY_GLOO = '''
import sys
import time
import torch
import torch.distributed as dist


class Slow(torch.Tensor):
    """A tensor that the thread that drops it last takes as long to free as on a machine that is busy."""

    def __del__(self):
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            pass


def keep_gloo_busy():
    for _ in range(4):
        dist.all_reduce(torch.ones(64).as_subclass(Slow), async_op=True)  # gloo's threads drop the tensors
    dist.all_reduce(torch.ones(1))
'''

TRAINED = """
from torch.distributed.fsdp import fully_shard
from torchtune_adaptive import RowLimit, SampleKind, StepRunner, Totals

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
fully_shard(model)


def forward_backward(samples):
    loss = model(torch.stack(samples)).sum()
    loss.backward()
    return Totals(loss.detach(), len(samples))


kind = SampleKind(length_of=len, filler=lambda sample: sample)
runner = StepRunner(model, forward_backward, limit=RowLimit(2), kind=kind)
runner.run([torch.ones(8)], step=1)
keep_gloo_busy()
runner.close()
dist.destroy_process_group()
"""

NOTHING_LEFT = """
from torchtune_adaptive.errors import RunFinished
from torchtune_adaptive.lifecycle.entry_point import run_recipe


class Recipe:
    def __init__(self, cfg):
        dist.init_process_group("gloo")
        keep_gloo_busy()
        raise RunFinished("nothing left to train")


run_recipe(Recipe)
"""


@pytest.mark.parametrize("what", [TRAINED, NOTHING_LEFT], ids=["trained", "nothing left"])
def test_process_exits_with_status_0_while_gloo_holds_tensors(tmp_path: Path, what: str):
    program, config = tmp_path / "program.py", tmp_path / "config.yaml"
    program.write_text(BUSY_GLOO + what)
    config.write_text("output_dir: nowhere\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    ended = run_command([*launcher, str(program), "--config", str(config)], cwd=tmp_path, timeout_s=120)
    assert ended.status == 0, ended.output
