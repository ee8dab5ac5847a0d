"""Two nodes: a `tune run` on each, that meet at an address. Here both are on this machine, in folders of their own."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.commands import run_here
from tests.ranks import free_ports
from tests.recipes.running import RELATIVE_AFTER_ADAM, Finished

TUNE = str(Path(sys.executable).parent / "tune")
RECIPE = "adaptive_full_finetune_distributed"
SHRUNK = (
    "--config",
    "adaptive/demo/full",
    "output_dir=out",
    "use_maximum_batch_size=False",
    "epochs=1",
    "dataset.samples=64",
    "batch_size=8",
    "gradient_accumulation_steps=1",
    "clip_grad_norm=inf",
)
UNLIMITED = "adaptive=null"
LITTLE_ON_THE_SECOND_NODE = "adaptive.memory_limit=[120MiB,64MiB]"
TIMEOUT_S = 120


class Run(NamedTuple):
    first: Finished
    """Of the node with rank 0, which is the one that speaks."""
    second: Finished | None
    steps: list[dict[str, float]]
    """The metric log."""

    @property
    def trained(self) -> list[tuple[float, float]]:
        return [(step["loss"], step["grad_norm"]) for step in self.steps]


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Run:
    cwd = tmp_path_factory.mktemp("one_node")
    ended = run_here(
        [TUNE, "run", "--nproc_per_node", "2", RECIPE, *SHRUNK, UNLIMITED],
        cwd=cwd,
        timeout_s=TIMEOUT_S,
        leaves_nothing=True,
    )
    assert ended.status == 0, ended.output
    return Run(ended, None, metric_log(cwd))


def run_on_two_nodes(folder: Path, *arguments: str) -> Run:
    """The README's command on each node; which of them has rank 0 is up to their meeting."""
    endpoint = f"localhost:{free_ports(1)[0]}"
    command = [
        TUNE,
        "run",
        "--nnodes",
        "2",
        "--nproc_per_node",
        "1",
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        endpoint,
        RECIPE,
        *arguments,
    ]
    nodes = [folder / "node_a", folder / "node_b"]
    for node in nodes:
        node.mkdir()
    with ThreadPoolExecutor(len(nodes)) as pool:
        ways = {"timeout_s": TIMEOUT_S, "leaves_nothing": True}
        runs = [pool.submit(run_here, command, cwd=node, **ways) for node in nodes]
        ended = {node: run.result() for node, run in zip(nodes, runs, strict=True)}
    assert [run.status for run in ended.values()] == [0, 0], "\n".join(run.output for run in ended.values())
    first, second = sorted(nodes, key=lambda node: not (node / "out" / "logs").exists())
    return Run(ended[first], ended[second], metric_log(first))


def metric_log(cwd: Path) -> list[dict[str, float]]:
    (log,) = (cwd / "out" / "logs").glob("*.txt")
    lines = re.findall(r"^Step \d+ \| (.*)$", log.read_text(), re.MULTILINE)
    return [{name: float(value) for name, value in (item.split(":") for item in line.split())} for line in lines]


def test_two_nodes_with_a_rank_each_train_as_one_node_with_two_ranks(one_node: Run, tmp_path: Path) -> None:
    two_nodes = run_on_two_nodes(tmp_path, *SHRUNK, UNLIMITED)
    assert len(one_node.trained) == 4
    assert two_nodes.trained == one_node.trained
    assert "8 rows × 1 microbatch × 2 ranks = 16 samples a step (as configured)" in two_nodes.first.output


def test_out_of_memory_on_the_second_node_costs_repeated_steps_on_both(one_node: Run, tmp_path: Path) -> None:
    run = run_on_two_nodes(tmp_path, *SHRUNK, LITTLE_ON_THE_SECOND_NODE)
    assert run.second is not None
    recoveries = re.findall(r"out of memory on (rank.*?) \(longest .*step repeated", run.first.output)
    assert set(recoveries) == {"rank 1"}
    assert run.steps[-1]["oom_recoveries"] == len(recoveries)
    assert "out of memory" not in run.second.output
    for limited, unlimited in zip(run.steps, one_node.steps, strict=True):
        for figure in ("loss", "grad_norm"):
            assert limited[figure] == pytest.approx(unlimited[figure], rel=RELATIVE_AFTER_ADAM), figure
    checkpoint = Path("out", "epoch_0", "model-00001-of-00001.bin")
    assert [(tmp_path / node / checkpoint).exists() for node in ("node_a", "node_b")].count(True) == 1
