"""`adaptive_plan` on the command line."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import adaptive_plan
import pytest

from tests.forecast.two_ranks import errors_and_flushes, plan_request, rehearsed, trained
from tests.null.processes import skip_without_null_device
from torchtune_adaptive.config.command_line import locate, read_config
from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.forecast import alternatives
from torchtune_adaptive.forecast.output import training_command
from torchtune_adaptive.forecast.rehearse_recipe import Forecast
from torchtune_adaptive.forecast.request import PlanRequest, read_request
from torchtune_adaptive.rehearse.result import RehearsalResult

GIB = 2**30
SMALL = ("model.num_layers=2", "model.embed_dim=1024", "model.intermediate_dim=4096", "model.max_seq_len=4096")
DEMO = ("adaptive/demo/full", "device=cuda", *SMALL)


@pytest.fixture(autouse=True, scope="module")
def null_device() -> None:
    skip_without_null_device()


def run_plan(config: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    tune = [str(Path(sys.executable).with_name("tune")), "run", "adaptive_plan", "--config", config, *words]
    return subprocess.run(
        tune, cwd=cwd, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
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
    assert chosen["rows"] > 8
    assert [size["rows"] for size in chosen["sizes"] if size["chosen"]] == [chosen["rows"]]
    assert chosen["allocated_bytes"] < chosen["reserved_bytes"] <= chosen["usable_bytes"] == 3 * GIB
    assert f"batch_size={chosen['rows']}" in chosen["command"]
    (row,) = answer(*question, f"batch_size={chosen['rows']}", cwd=tmp_path)
    assert (row["rows"], row["fits"], row["sizes"]) == (chosen["rows"], True, [])
    # the run starts with an empty cache
    assert row["reserved_bytes"] == pytest.approx(chosen["reserved_bytes"], rel=0.03)
    assert row["tokens_per_second"] == pytest.approx(2 * 512 * row["rows"] / row["seconds"])


def test_numbers_of_ranks_and_gpus_give_one_table_whose_cheapest_row_has_the_command(tmp_path: Path) -> None:
    sizes = ("batch_size=4", "use_maximum_batch_size=False", "sequence_length=512")
    prices = ("price.h100=2.4", "price.l4=0.1")
    ended = run_plan(*DEMO, "world_size=[2,4]", "memory_limit=l4,h100", *sizes, *prices, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    _, *lines = ended.stdout.splitlines()
    rows = [line.split() for line in lines[:4]]
    assert [row[:3] for row in rows] == [[card, ranks, "yes"] for ranks in "24" for card in ("l4", "h100")]
    assert float(rows[1][3]) > float(rows[3][3]), "more ranks need less"
    costs = [float(row[9]) for row in rows]
    (cheapest,) = (at for at, line in enumerate(lines[:4]) if line.endswith("4 rows of 512 tokens  <- cheapest"))
    assert costs[cheapest] == min(costs) < max(costs)
    assert lines[-1].startswith(f"train with: tune run --nproc_per_node {rows[cheapest][1]} ")


def test_config_that_does_not_fit_lists_settings_that_do_with_their_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [alternatives.EVERY_SECOND_LAYER, ("enable_activation_checkpointing=True",), ("compile=True",)]
    monkeypatch.setattr(alternatives, "changes_that_save_memory", lambda *_: changes)
    path, sizes = locate("adaptive/demo/full"), ("memory_limit=3500MiB", "memory_overhead=0", "sequence_length=4096")
    words = [*DEMO[1:], "model.num_layers=8", *sizes, "batch_size=1", "use_maximum_batch_size=False"]
    with pytest.raises(AdaptiveError, match="the config does not fit; the settings above fit"):
        adaptive_plan.main(read_config(path, words), path, words)
    printed = capsys.readouterr().out
    assert "does not fit: out of memory in step 1" in printed
    rates = [float(line.split()[8].replace(",", "")) for line in printed.splitlines() if "  yes  " in line]
    assert rates == sorted(rates, reverse=True)
    assert len(rates) == 2
    assert "train with: tune run --nproc_per_node 1 adaptive_full_finetune_distributed" in printed


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
    assert stages <= {size["stage"] for size in found["sizes"] if size["chosen"]}
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
    with pytest.raises(ConfigError, match="so the forecast would be wrong"):
        read_request(read_config(locate(config), ["memory_limit=h100"]), config, ())


def test_smaller_batches_are_tried_before_other_settings(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def nothing_fits(candidate: PlanRequest) -> Forecast:
        raise AdaptiveError(f"{candidate.batch_size} rows do not fit")

    monkeypatch.setattr(alternatives, "rehearse_recipe", nothing_fits)
    words = ["device=cuda", "memory_limit=8GiB", "batch_size=64", "use_maximum_batch_size=False"]
    cfg = read_config(locate("adaptive/demo/full"), words)
    assert list(alternatives.try_alternatives(read_request(cfg, "", words))) == []
    printed = capfd.readouterr().err
    assert printed.startswith("use_maximum_batch_size=True: None rows do not fit\n")
    assert printed.count("64 rows do not fit") > 10


def test_no_other_setting_is_tried_if_fewer_rows_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(candidate: PlanRequest) -> Forecast:
        rehearsal = RehearsalResult(usable_bytes=GIB, overhead_bytes=0, rank=0, ranks=1, status=0,
                              steps=[{"allocated_bytes": 1, "reserved_bytes": 1, "flushes": 0}],
                              searches=[{"stage": "", "result": {"rows": 8}}])  # fmt: skip
        return Forecast(candidate, rehearsal)

    monkeypatch.setattr(alternatives, "rehearse_recipe", fits)
    words = ["device=cuda", "memory_limit=8GiB", "batch_size=64", "use_maximum_batch_size=False"]
    asked = read_request(read_config(locate("adaptive/demo/full"), words), "adaptive/demo/full", words)
    (tried,) = alternatives.try_alternatives(asked)
    # the same samples per step
    assert " batch_size=64 use_maximum_batch_size=True " in training_command(tried)


def test_searches_and_error_of_the_recipe_are_read_from_the_record(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    lines = [
        {"kind": "search", "stage": "", "result": {"rows": 8}},
        {"kind": "message", "text": "no room: lower adaptive.memory_limit"},
    ]
    record.write_text("\n".join(map(json.dumps, lines)))
    rehearsal = RehearsalResult.read(record, usable_bytes=GIB, overhead_bytes=0, rank=0, ranks=1, status=1)
    forecast = Forecast(plan_request(2).with_overrides(("use_maximum_batch_size=True",)), rehearsal)
    assert forecast.searches == {"": {"rows": 8}}
    assert forecast.verdict == "does not fit: no room: lower adaptive.memory_limit"


def test_signal_ends_all_rehearsals() -> None:
    def end_this() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    soon = threading.Timer(2, end_this)
    soon.start()
    with pytest.raises(KeyboardInterrupt):
        list(alternatives.try_alternatives(plan_request(12)))
    soon.join()


def test_several_processes_are_refused_with_the_option_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="but 4 were started: remove --nproc_per_node, and set world_size=4"):
        adaptive_plan.main(read_config(locate("adaptive/demo/full"), []), Path("full.yaml"), [])


def test_recoveries_and_flushes_are_those_of_a_run_on_two_ranks() -> None:
    found, ranks = rehearsed(plan_request(12), alike=True), trained(plan_request(12), alike=True)
    assert len(ranks) == 2
    for rank in ranks:
        assert errors_and_flushes(found) == errors_and_flushes(rank)
        assert found.steps == rank.steps
    assert sum(errors for errors, _ in errors_and_flushes(found)) > 0
    assert len({step["allocated_bytes"] for step in found.steps}) > 5
