"""Two nodes: one launcher each, with a common rendezvous. Both are on this machine."""

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.forked_commands import STARTS_S, Forked, run_forked, run_in_terminal
from tests.ranks import PATIENCE, free_ports
from tests.recipes.recorders import assert_same_figures
from tests.recipes.running import RELATIVE_AFTER_ADAM
from tests.timeline import read_timeline

RUN = (
    *("adaptive_full_finetune_distributed", "--config", "adaptive/demo/full", "output_dir=out", "epochs=1"),
    "use_maximum_batch_size=False",
)


def test_two_nodes_train_like_one_although_the_second_runs_out_of_memory(tmp_path: Path) -> None:
    """Either node may get rank 0. The nodes have separate folders."""
    nodes = one, *two = [tmp_path / name for name in ("one_node", "node_a", "node_b")]
    for folder in nodes:
        folder.mkdir()
    run = partial(run_forked, timeout_s=120, expect_no_leftovers=True)
    tune = [str(Path(sys.executable).parent / "tune"), "run"]
    small = (*RUN, "dataset.samples=64", "batch_size=8", "gradient_accumulation_steps=1", "clip_grad_norm=inf")
    ended = run([*tune, "--nproc_per_node", "2", *small, "adaptive=null"], cwd=one)
    assert ended.status == 0, ended.output
    meeting = ("--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{free_ports(1)[0]}")
    command = [*tune, "--nnodes", "2", "--nproc_per_node", "1", *meeting, *small]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda cwd: run([*command, "adaptive.memory_limit=[120MiB,64MiB]"], cwd=cwd), two))
    assert [each.status for each in both] == [0, 0], "\n".join(each.output for each in both)
    [first] = [folder for folder in two if (folder / "out" / "logs").exists()]
    timeline, unlimited = read_timeline(first / "out"), read_timeline(one / "out")
    recoveries = [event for event in timeline.events if event["kind"] == "recovery"]
    assert {tuple(event["ranks"]) for event in recoveries} == {(1,)}
    assert sorted("out of memory" in each.output for each in both) == [False, True], "only rank 0 prints"
    assert len(unlimited.steps) == 4
    assert_same_figures(timeline.steps, unlimited.steps, ("step", "loss", "grad_norm"), rel=RELATIVE_AFTER_ADAM)
    assert sum((folder / "out" / "epoch_0" / "model-00001-of-00001.bin").exists() for folder in two) == 1


STEPS = 40
RESUMED = (
    *RUN,
    *("adaptive.memory_limit=null", "adaptive.sequence_length=null", "dataset.samples=640", "batch_size=2"),
    *("gradient_accumulation_steps=2", "data_parallel_replicate_dim=2", "save_every_n_steps=2"),
    "resume_from_checkpoint=auto",
)
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, in torch 2.13, a surviving launcher does not publish the master address to a new one: it keeps the
address of the first round and never writes it again.
"""
RESTARTS_S = 200.0
"""The rendezvous needs up to 15 s to notice a lost node; then the ranks restart."""


def node(folder: Path, port: int, *, hosts: bool, **variables: str) -> AbstractContextManager[Forked]:
    """Start the launcher of a node; one of two hosts the rendezvous store."""
    meet = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}", "--rdzv_conf", f"is_host={int(hosts)}"]
    launcher = ["--nnodes", "2", "--nproc_per_node", "2", *meet, "--max_restarts", "3"]
    return run_in_terminal(folder, [*launcher, *RESUMED], **{**NEW_STORE, **variables})


def newest(*nodes: Forked) -> int:
    """Return the step of the newest checkpoint in the output."""
    return max((int(step) for each in nodes for step in re.findall(r"step_(\d+) saved in", each.output)), default=0)


def kill(lost: Forked) -> None:
    """Kill the launcher; the kernel then kills its ranks."""
    os.kill(lost.pid, signal.SIGKILL)
    lost.wait(10)
    lost.when(lambda: not lost.ranks(), 10 * PATIENCE)


@contextmanager
def two_nodes(folder: Path, port: int, **variables: str) -> Iterator[list[Forked]]:
    """Run two nodes with two ranks each and hybrid sharding until the run has saved one or two checkpoints."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(node(folder, port, hosts=hosts, **variables)) for hosts in (True, False)]
        nodes[0].when(lambda: newest(*nodes) >= 4, STARTS_S)
        yield nodes


def wait_for(nodes: Sequence[Forked]) -> None:
    for each in nodes:
        each.when(lambda each=each: each.returncode is not None, RESTARTS_S)


def assert_resumed(nodes: Sequence[Forked], before: int, folder: Path) -> None:
    """Check that the run resumed once and trained to the end."""
    wait_for(nodes)
    output = "\n".join(each.output for each in nodes)
    assert [each.returncode for each in nodes] == [0, 0], output
    [resumed] = re.findall(r"resuming from \S+/step_(\d+)", output)
    assert int(resumed) >= before, output
    assert [step["step"] for step in read_timeline(folder / "out").steps] == [*range(1, STEPS + 1)]
    assert (folder / "out" / "epoch_0").is_dir()


def test_run_continues_when_a_lost_node_returns(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with two_nodes(tmp_path, port) as [first, second]:
        kill(second)
        before = newest(first, second)
        with node(tmp_path, port, hosts=False) as again:
            assert_resumed([first, again], before, tmp_path)


@pytest.mark.smoke
def test_killed_rank_restarts_both_nodes_with_the_old_store(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with two_nodes(tmp_path, port, **dict.fromkeys(NEW_STORE, "0")) as nodes:
        before = newest(*nodes)
        os.kill(nodes[1].ranks()[1], signal.SIGKILL)
        assert_resumed(nodes, before, tmp_path)


@pytest.mark.nightly
def test_run_that_loses_the_rendezvous_ends_and_the_same_command_resumes(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with two_nodes(tmp_path, port) as [first, second]:
        kill(first)
        before = newest(first, second)
        wait_for([second])
        assert second.returncode != 0, second.output
    with ExitStack() as stack:
        nodes = [stack.enter_context(node(tmp_path, port, hosts=hosts)) for hosts in (True, False)]
        assert_resumed(nodes, before, tmp_path)
