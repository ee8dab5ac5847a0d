"""Two nodes with two ranks each, hybrid sharding and --max-restarts: how a run continues after a node is lost.

Both nodes are launchers on this machine. One of them hosts the rendezvous store.
"""

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.ranks import PATIENCE, free_ports
from tests.recipes.terminal import STARTS_S, Started, run_in_terminal

RECIPE = "adaptive_full_finetune_distributed"
RUN = (
    "--config",
    "adaptive/demo/full",
    "output_dir=out",
    "use_maximum_batch_size=False",
    "adaptive.memory_limit=null",
    "adaptive.sequence_length=null",
    "epochs=1",
    "dataset.samples=640",
    "batch_size=2",
    "gradient_accumulation_steps=2",
    "data_parallel_replicate_dim=2",
    "save_every_n_steps=2",
    "resume_from_checkpoint=auto",
)
STEPS = 40
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, in torch 2.13, a surviving launcher does not publish the master address to a new one: it keeps the
address of the first round and never writes it again.
"""
RESTARTS_S = 200.0
"""The rendezvous needs up to 15 s to notice a lost node; then the ranks restart."""


def node(
    folder: Path, port: int, *overrides: str, meeting_place: bool, restarts: int, **variables: str
) -> AbstractContextManager[Started]:
    """Start the launcher of one node; collect its output and that of its ranks."""
    meet = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}"]
    conf = ["--rdzv_conf", f"is_host={int(meeting_place)}", "--max_restarts", str(restarts)]
    launcher = ["--nnodes", "2", "--nproc_per_node", "2", *meet, *conf]
    return run_in_terminal(folder, [*launcher, RECIPE, *RUN, *overrides], **{**NEW_STORE, **variables})


def saved(*nodes: Started) -> list[int]:
    """Return the steps of the checkpoints in the output."""
    return [int(step) for node in nodes for step in re.findall(r"step_(\d+) saved in", node.output)]


def kill(lost: Started) -> None:
    """Kill the launcher; the kernel then kills its ranks."""
    os.kill(lost.process.pid, signal.SIGKILL)
    lost.process.wait(10)
    lost.when(lambda: not lost.ranks(), 10 * PATIENCE)


@contextmanager
def two_nodes(folder: Path, port: int, *overrides: str, restarts: int, **variables: str) -> Iterator[list[Started]]:
    """Run two nodes until the run has saved one or two checkpoints."""
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(node(folder, port, *overrides, meeting_place=where, restarts=restarts, **variables))
            for where in (True, False)
        ]
        nodes[0].when(lambda: max(saved(*nodes), default=0) >= 4, STARTS_S)
        yield nodes


def wait_for(nodes: Sequence[Started], timeout_s: float = RESTARTS_S) -> str:
    """Wait until the nodes have ended; return their output."""
    for each in nodes:
        each.when(lambda each=each: each.process.poll() is not None, timeout_s)
    return "\n".join(each.output for each in nodes)


def assert_resumed(nodes: Sequence[Started], before: int, folder: Path) -> None:
    """Check that the run resumed and trained to the end."""
    message = "\n".join(each.output for each in nodes)
    assert [each.process.returncode for each in nodes] == [0, 0], message
    [resumed, *_] = re.findall(r"resuming from \S+/step_(\d+)", message)
    assert int(resumed) >= before, message
    assert f"{STEPS} of {STEPS} steps" in message, message
    assert (folder / "out" / "epoch_0").is_dir()


def test_run_continues_when_a_lost_node_returns(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with two_nodes(tmp_path, port, restarts=3) as [first, second]:
        kill(second)
        before = max(saved(first, second))
        with node(tmp_path, port, meeting_place=False, restarts=3) as again:
            wait_for([first, again])
    assert_resumed([first, again], before, tmp_path)


@pytest.mark.smoke
def test_killed_rank_restarts_both_nodes_with_the_old_store(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    old_store = dict.fromkeys(NEW_STORE, "0")
    with two_nodes(tmp_path, port, restarts=2, **old_store) as nodes:
        before = max(saved(*nodes))
        os.kill(nodes[1].ranks()[1], signal.SIGKILL)
        message = wait_for(nodes)
    assert_resumed(nodes, before, tmp_path)
    assert message.count("resuming from") == 1


@pytest.mark.nightly
def test_restart_unknown_to_rank_0_loses_no_checkpoint(tmp_path: Path) -> None:
    """Each launcher counts only the restarts requested by its ranks. Rank 0's ranks are stopped here, as if they
    waited for a GPU, so the other launcher restarts all ranks.
    """
    (port,) = free_ports(1)
    with two_nodes(tmp_path, port, "resume_from_checkpoint=False", restarts=1) as nodes:
        for pid in nodes[0].ranks():
            os.kill(pid, signal.SIGSTOP)
        before = max(saved(*nodes))
        os.kill(nodes[1].ranks()[0], signal.SIGKILL)
        message = wait_for(nodes)
    assert [each.process.returncode != 0 for each in nodes] == [True, True], message
    assert "contains checkpoints of an earlier run" in message, message
    assert (tmp_path / "out" / f"step_{before}").is_dir(), message


@pytest.mark.nightly
def test_run_that_loses_the_rendezvous_ends_and_the_same_command_resumes(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with two_nodes(tmp_path, port, restarts=3) as [first, second]:
        kill(first)
        before = max(saved(first, second))
        wait_for([second])
        assert second.process.returncode != 0, second.output
    with two_nodes(tmp_path, port, restarts=3) as nodes:
        wait_for(nodes, STARTS_S + RESTARTS_S)
    assert_resumed(nodes, before, tmp_path)
