"""`tune-adaptive plan` on the command line."""

import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.null.processes import skip_without_null_device
from tests.rehearse_recipe.two_ranks import errors_and_flushes, plan_request, rehearsed, trained
from torchtune_adaptive.config.command_line import locate, read_config
from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.rehearse.gpus import GPUS, Gpu
from torchtune_adaptive.rehearse.result import RehearsalResult
from torchtune_adaptive.rehearse.sweep import SweepRow, compare
from torchtune_adaptive.rehearse_recipe.plan import print_plan, training_command
from torchtune_adaptive.rehearse_recipe.request import PlanRequest, read_request
from torchtune_adaptive.rehearse_recipe.start import rehearse_recipe

GIB = 2**30
SMALL = ("model.num_layers=2", "model.embed_dim=1024", "model.intermediate_dim=4096", "model.max_seq_len=4096")
DEMO = ("adaptive/demo/full", "device=cuda", *SMALL)


@pytest.fixture(autouse=True, scope="module")
def null_device() -> None:
    skip_without_null_device()


def run_plan(config: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    plan = [str(Path(sys.executable).with_name("tune-adaptive")), "plan", "--config", config, *words]
    return subprocess.run(
        plan, cwd=cwd, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def answer(config: str, *words: str, cwd: Path) -> Any:
    ended = run_plan(config, *words, "format=json", cwd=cwd)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.smoke
def test_predicted_memory_is_that_of_a_run_with_the_chosen_batch_size(tmp_path: Path) -> None:
    question = (*DEMO, "world_size=2", "memory_limit=6GiB", "sequence_length=512", "use_maximum_batch_size=False",
                "gradient_accumulation_steps=1")  # fmt: skip
    (chosen,) = answer(*question, cwd=tmp_path)
    (search,) = chosen["searches"]
    rows = search["result"]["rows"]
    assert rows > 8
    assert chosen["reserved_bytes"] <= chosen["usable_bytes"] == 3 * GIB
    assert " use_maximum_batch_size=True " in chosen["command"]
    (row,) = answer(*question, f"batch_size={rows}", cwd=tmp_path)
    assert (row["fits"], row["searches"]) == (True, [])
    assert f"batch_size={rows}" in row["command"]
    # the run starts with an empty cache
    assert row["reserved_bytes"] == pytest.approx(chosen["reserved_bytes"], rel=0.03)
    assert row["tokens_per_second"] == pytest.approx(2 * 512 * rows / row["seconds"])


def test_numbers_of_ranks_and_gpus_give_one_table_whose_fastest_row_has_the_command(tmp_path: Path) -> None:
    sizes = ("batch_size=4", "use_maximum_batch_size=False", "sequence_length=512")
    ended = run_plan(*DEMO, "world_size=[2,4]", "memory_limit=l4,h100", *sizes, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    _, _, *lines = ended.stdout.splitlines()
    rows = [line.split() for line in lines[:4]]
    assert [row[:3] for row in rows] == [[card, ranks, "yes"] for ranks in "24" for card in ("l4", "h100")]
    assert float(rows[1][3]) > float(rows[3][3]), "more ranks need less"
    rates = [float(row[8].replace(",", "")) for row in rows]
    (fastest,) = (at for at, line in enumerate(lines[:4]) if line.endswith("<- fastest"))
    assert rates[fastest] == max(rates) > min(rates)
    assert lines[-1].startswith(f"train with: tune run --nproc_per_node {rows[fastest][1]} ")


def test_config_that_does_not_fit_is_an_error_with_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("memory_limit=1500MiB", "memory_overhead=0", "sequence_length=4096")
    words = [*DEMO[1:], "model.num_layers=8", *sizes, "batch_size=1", "use_maximum_batch_size=False"]
    with pytest.raises(AdaptiveError, match="the config does not fit: lower batch_size"):
        print_plan(DEMO[0], words)
    assert "does not fit: out of memory in step 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "stages"),
    [
        ("lora", {""}),
        ("dpo", {"policy", "reference log-probabilities"}),
        ("ppo", {"generate", "train policy", "train value"}),
    ],
)
def test_every_recipe_has_a_prediction_by_stage(config: str, stages: set[str], tmp_path: Path) -> None:
    (found,) = answer(f"adaptive/demo/{config}", "device=cuda", "memory_limit=4GiB", "world_size=2", cwd=tmp_path)
    assert stages <= {search["stage"] for search in found["searches"] if search["result"]["rows"]}
    assert (found["seconds"] is None) == (config == "ppo"), "in PPO's rehearsed steps, answers end at once"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("sequence_length=5000",), "has 5000 tokens, but the model takes at most 4096"),
    ],
)
def test_config_that_the_recipe_refuses_is_refused(words: tuple[str, ...], expected: str, tmp_path: Path) -> None:
    ended = run_plan(*DEMO, "memory_limit=h100", *words, cwd=tmp_path)
    assert ended.returncode == 1
    assert expected in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("config", ["llama3_2/8B_to_1B_KD_lora_distributed", "llama3/8B_qat_full"])
def test_config_of_an_unknown_recipe_is_refused(config: str) -> None:
    with pytest.raises(ConfigError, match="so the rehearsal would be wrong"):
        read_request(read_config(locate(config), ["memory_limit=h100"]), config, ())


def test_config_with_images_is_refused() -> None:
    config = "llama3_2_vision/11B_full"
    with pytest.raises(ConfigError, match="no images"):
        read_request(read_config(locate(config), ["memory_limit=h100"]), config, ())


def demo_request(*words: str) -> PlanRequest:
    words = ("device=cuda", "use_maximum_batch_size=False", *words)
    return read_request(read_config(locate("adaptive/demo/full"), words), "adaptive/demo/full", words)


def test_training_command_has_the_ranks_of_a_row_and_no_keys_of_this_command() -> None:
    request = demo_request("batch_size=64", "optimizer.fused=True", "world_size=2", "memory_limit=h100")
    found = RehearsalResult(usable_bytes=GIB, overhead_bytes=0, rank=0, ranks=16, status=0)
    command = training_command(request, SweepRow(GPUS["h100"], found))
    assert command == (
        "tune run --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint NODE0:29400 "
        "adaptive_full_finetune_distributed --config adaptive/demo/full device=cuda use_maximum_batch_size=False "
        "batch_size=64 optimizer.fused=True adaptive.memory_limit=null"
    )


def test_searches_and_error_of_the_recipe_are_read_from_the_record(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    peak = {"phase_bytes": {"forward": GIB, "backward": 2 * GIB}, "fits": True, "retries": 0}
    probes = [{"rows": 8, "length": 0, "peak": peak}, {"rows": 16, "length": 0, "peak": {**peak, "fits": False}}]
    error = {"step": 1, "in_search": True, "allocated_bytes": GIB, "reserved_bytes": GIB}
    lines = [
        {"kind": "search", "stage": "", "result": {"rows": 8, "reason": "a power of two", "probes": probes}},
        {"kind": "out_of_memory", **error},
        {"kind": "message", "text": "no room: lower adaptive.memory_limit"},
    ]
    record.write_text("\n".join(map(json.dumps, lines)))
    found = RehearsalResult.read(record, usable_bytes=GIB, overhead_bytes=0, rank=0, ranks=1, status=1)
    assert found.verdict() == "does not fit: no room: lower adaptive.memory_limit"
    assert found.rows == "8 rows"
    fits = RehearsalResult(usable_bytes=GIB, overhead_bytes=0, rank=0, ranks=1, status=0, searches=found.searches)
    table = [line.split() for line in fits.as_text().splitlines()[2:6]]
    assert table[2:] == [
        ["8", "2.0", "GiB", "<-", "chosen", "(a", "power", "of", "two)"],
        ["16", "out", "of", "memory"],
    ]


def rehearse_and_end_parent(request: PlanRequest, words: tuple[str, ...], card: Gpu, ranks: int) -> RehearsalResult:
    if ranks == 1:
        threading.Timer(1, os.kill, (os.getppid(), signal.SIGTERM)).start()
    return rehearse_recipe(request, words, card, ranks)


def test_signal_ends_all_rehearsals() -> None:
    request = plan_request()
    with pytest.raises(KeyboardInterrupt):
        compare(partial(rehearse_and_end_parent, request), (), request.gpus, [1, 2, 4])


def test_recoveries_and_flushes_are_those_of_a_run_on_two_ranks() -> None:
    found, ranks = rehearsed(12, alike=True), trained(12, alike=True)
    assert len(ranks) == 2
    for rank in ranks:
        assert errors_and_flushes(found) == errors_and_flushes(rank)
        assert found.steps == rank.steps
    assert sum(errors for errors, _ in errors_and_flushes(found)) > 0
    assert len({step["allocated_bytes"] for step in found.steps}) > 5
