"""Two nodes with two ranks each, hybrid sharding and --max-restarts: what becomes of the run when a node is lost.

Both nodes are launchers on this machine. One of them is the rendezvous: the store at which the nodes meet.
"""

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.ranks import PATIENCE, free_ports
from tests.recipes.terminal import STARTS_S, Started, in_a_terminal

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
    "overwrite_output_dir=False",
    "resume_from_checkpoint=auto",
)
STEPS = 40
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, in torch 2.13, a launcher that stays does not tell one that is new where the ranks meet: it keeps the
address of the first round, and writes it into no later one."""
TIMEOUT_S = 8
RESTARTS_S = 200.0
"""The rendezvous believes for up to 15 s that a node is there, then the ranks start anew."""


def node(
    folder: Path, port: int, *overrides: str, meeting_place: bool, restarts: int, **variables: str
) -> AbstractContextManager[Started]:
    """The launcher of one node, and what it and its ranks write."""
    meet = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}"]
    conf = ["--rdzv_conf", f"is_host={int(meeting_place)}", "--max_restarts", str(restarts)]
    launcher = ["--nnodes", "2", "--nproc_per_node", "2", *meet, *conf]
    return in_a_terminal(folder, [*launcher, RECIPE, *RUN, *overrides], forked=True, **{**NEW_STORE, **variables})


def saved(*nodes: Started) -> list[int]:
    """Steps of the checkpoints that the run has told of."""
    return [int(step) for node in nodes for step in re.findall(r"step_(\d+) saved in", node.output)]


def kill(lost: Started) -> None:
    """The launcher is gone at once, and the kernel takes its ranks along."""
    os.kill(lost.process.pid, signal.SIGKILL)
    lost.process.wait(10)
    lost.when(lambda: not lost.ranks(), 10 * PATIENCE)


@contextmanager
def two_nodes(folder: Path, port: int, *overrides: str, restarts: int, **variables: str) -> Iterator[list[Started]]:
    """Open, the run has saved a checkpoint or two."""
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(node(folder, port, *overrides, meeting_place=where, restarts=restarts, **variables))
            for where in (True, False)
        ]
        nodes[0].when(lambda: max(saved(*nodes), default=0) >= 4, STARTS_S)
        yield nodes


def wait_for(nodes: Sequence[Started], timeout_s: float = RESTARTS_S) -> str:
    """Until they have ended; what they have written."""
    for each in nodes:
        each.when(lambda each=each: each.process.poll() is not None, timeout_s)
    return "\n".join(each.output for each in nodes)


def assert_resumed(nodes: Sequence[Started], before: int, folder: Path) -> None:
    """And trained to the end."""
    told = "\n".join(each.output for each in nodes)
    assert [each.process.returncode for each in nodes] == [0, 0], told
    [resumed, *_] = re.findall(r"resuming from \S+/step_(\d+)", told)
    assert int(resumed) >= before, told
    assert f"{STEPS} of {STEPS} steps" in told, told
    assert (folder / "out" / "epoch_0").is_dir()


def test_a_run_that_loses_a_node_goes_on_when_the_node_is_back(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with two_nodes(tmp_path, port, restarts=3) as [first, second]:
        kill(second)
        before = max(saved(first, second))
        with node(tmp_path, port, meeting_place=False, restarts=3) as again:
            wait_for([first, again])
    assert_resumed([first, again], before, tmp_path)


@pytest.mark.smoke
def test_a_rank_that_is_killed_costs_a_restart_on_both_nodes_with_the_store_of_before(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    old_store = dict.fromkeys(NEW_STORE, "0")
    with two_nodes(tmp_path, port, restarts=2, **old_store) as nodes:
        before = max(saved(*nodes))
        os.kill(nodes[1].ranks()[1], signal.SIGKILL)
        told = wait_for(nodes)
    assert_resumed(nodes, before, tmp_path)
    assert told.count("resuming from") == 1


@pytest.mark.nightly
def test_a_restart_that_rank_0_cannot_know_of_costs_no_checkpoint(tmp_path: Path) -> None:
    """Each launcher counts the restarts for which its own ranks ask. Rank 0's stand still here, as ranks may that wait
    for a GPU, so it is the other node's launcher that has all of them started again."""
    (port,) = free_ports(1)
    fresh = ("overwrite_output_dir=True", "resume_from_checkpoint=False")
    with two_nodes(tmp_path, port, *fresh, restarts=1) as nodes:
        for pid in nodes[0].ranks():
            os.kill(pid, signal.SIGSTOP)
        before = max(saved(*nodes))
        os.kill(nodes[1].ranks()[0], signal.SIGKILL)
        told = wait_for(nodes)
    assert [each.process.returncode != 0 for each in nodes] == [True, True], told
    assert "contains checkpoints of an earlier run or of this one" in told, told
    assert (tmp_path / "out" / f"step_{before}").is_dir(), told


@pytest.mark.nightly
def test_a_run_that_loses_its_meeting_place_ends_and_the_same_command_goes_on(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with two_nodes(tmp_path, port, restarts=3) as [first, second]:
        kill(first)
        before = max(saved(first, second))
        wait_for([second])
        assert second.process.returncode != 0, second.output
    with two_nodes(tmp_path, port, restarts=3) as nodes:
        wait_for(nodes, STARTS_S + RESTARTS_S)
    assert_resumed(nodes, before, tmp_path)


@pytest.mark.parametrize(
    "hung", [pytest.param(0, id="the meeting place", marks=pytest.mark.nightly), pytest.param(1, id="the other node")]
)
def test_a_node_that_hangs_is_named_on_the_other_with_the_command_that_goes_on(hung: int, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with two_nodes(tmp_path, port, f"adaptive.silent_rank_timeout={TIMEOUT_S}", restarts=0) as nodes:
        stopped, other = nodes[hung].ranks(), nodes[1 - hung]
        for pid in (nodes[hung].process.pid, *stopped):
            os.kill(pid, signal.SIGSTOP)
        other.when(lambda: "not responded for" in other.output, TIMEOUT_S * PATIENCE)
    (told,) = {*re.findall(r"^error: (.*)$", other.output, re.MULTILINE)}
    assert ("the rendezvous store", "ranks 2, 3 (pid ")[hung] in told, told
    assert all(f"pid {pid} " in told for pid in stopped) or hung == 0, told
    assert re.search(r"last checkpoint: \S+/out/step_\d+\. To resume: .* resume_from_checkpoint=auto$", told), told
