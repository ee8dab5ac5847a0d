"""Two nodes: one `tune run` each, with a common rendezvous. Both are on this machine, in separate folders."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.forked_commands import run_forked
from tests.ranks import free_ports
from tests.recipes.recorders import assert_same_figures
from tests.recipes.running import RELATIVE_AFTER_ADAM

TUNE = [str(Path(sys.executable).parent / "tune"), "run"]
RECIPE = (
    "adaptive_full_finetune_distributed",
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


def metric_log(cwd: Path) -> list[dict[str, float]]:
    (log,) = (cwd / "out" / "logs").glob("*.txt")
    lines = re.findall(r"^Step \d+ \| (.*)$", log.read_text(), re.MULTILINE)
    return [{name: float(value) for name, value in (item.split(":") for item in line.split())} for line in lines]


def test_two_nodes_train_like_one_although_the_second_runs_out_of_memory(tmp_path: Path) -> None:
    """Run README's command on each node; either node may get rank 0."""
    nodes = one, *two = [tmp_path / name for name in ("one_node", "node_a", "node_b")]
    for node in nodes:
        node.mkdir()
    run = partial(run_forked, timeout_s=120, expect_no_leftovers=True)
    ended = run([*TUNE, "--nproc_per_node", "2", *RECIPE, "adaptive=null"], cwd=one)
    assert ended.status == 0, ended.output
    meeting = ("--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{free_ports(1)[0]}")
    little_on_the_second = "adaptive.memory_limit=[120MiB,64MiB]"
    command = [*TUNE, "--nnodes", "2", "--nproc_per_node", "1", *meeting, *RECIPE, little_on_the_second]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda node: run(command, cwd=node), two))
    assert [each.status for each in both] == [0, 0], "\n".join(each.output for each in both)
    [first] = [node for node in two if (node / "out" / "logs").exists()]
    speaks, silent = sorted((each.output for each in both), key=lambda output: "samples a step" not in output)
    assert "8 rows × 1 microbatch × 2 ranks = 16 samples a step (as configured)" in speaks
    recoveries = re.findall(r"out of memory on (rank.*?) \(longest .*step repeated", speaks)
    assert set(recoveries) == {"rank 1"}
    assert "out of memory" not in silent
    limited, unlimited = metric_log(first), metric_log(one)
    assert len(limited) == len(unlimited) == 4
    assert limited[-1]["oom_recoveries"] == len(recoveries)
    assert_same_figures(limited, unlimited, ("loss", "grad_norm"), rel=RELATIVE_AFTER_ADAM)
    assert sum((node / "out" / "epoch_0" / "model-00001-of-00001.bin").exists() for node in two) == 1
