"""`rehearse --without-data`: recipes without files of weights, tokenizer and data."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from gpu_rehearsal.report.record import COMPARED
from gpu_rehearsal.report.result import RehearsalResult
from omegaconf import OmegaConf

from tests.null.processes import skip_without_null_device
from tests.rehearsals.conftest import Rehearse
from tests.rehearsals.two_ranks import SIZES, errors_and_flushes, rehearsed, trained
from torchtune_adaptive.config.command_line import locate
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rehearsing import with_stand_ins

GIB = 2**30


def options(recipe: str, config: str, *words: str, memory: str) -> tuple[str, ...]:
    command = ("tune", "run", recipe, "--config", config, "device=cuda", "adaptive.memory_limit=null", *words)
    return "--without-data", "--memory", memory, "--ranks", "2", "--steps", "2", "--", *command


@pytest.mark.smoke
def test_predicted_memory_is_that_of_a_run_with_the_chosen_batch_size(rehearse: Rehearse) -> None:
    words = (*SIZES, "adaptive.sequence_length=512", "gradient_accumulation_steps=1")
    full = options("adaptive_full_finetune_distributed", "adaptive/demo/full", *words, memory="6GiB")
    chosen = rehearse(*full, "use_maximum_batch_size=True").found
    (search,) = chosen["searches"]
    rows = search["result"]["rows"]
    assert rows > 8
    assert search["text"].splitlines()[1].split() == ["rows", "peak", "of", "budget", "time"]
    assert not re.search(r"\d s\b", search["text"])  # no time, since no kernel has run
    most = max(step["reserved_bytes"] for step in chosen["steps"])
    assert most <= chosen["usable_bytes"] == 3 * GIB
    given = rehearse(*full, "use_maximum_batch_size=False", f"batch_size={rows}").found
    assert (given["fits"], given["searches"]) == (True, [])
    # the run starts with an empty cache
    assert max(step["reserved_bytes"] for step in given["steps"]) == pytest.approx(most, rel=0.03)
    assert given["time"]["tokens_per_step"] == 2 * 512 * rows


@pytest.mark.parametrize(
    ("recipe", "config", "stages"),
    [
        ("lora_finetune", "lora", {""}),
        ("full_dpo", "dpo", {"policy", "reference log-probabilities"}),
        ("ppo_full_finetune", "ppo", {"generate", "train policy", "train value"}),
    ],
)
def test_every_recipe_has_a_prediction_by_stage(rehearse: Rehearse, recipe: str, config: str, stages: set[str]) -> None:
    names = f"adaptive_{recipe}_distributed", f"adaptive/demo/{config}", "use_maximum_batch_size=True"
    found = rehearse(*options(*names, memory="4GiB")).found
    assert stages <= {search["stage"] for search in found["searches"] if search["result"]["rows"]}
    assert (found["time"] is None) == (config == "ppo"), "in PPO's rehearsed steps, answers end at once"


def test_config_with_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no images"):
        with_stand_ins(OmegaConf.load(locate("llama3_2_vision/11B_full")), tmp_path)


def test_searches_and_error_of_the_recipe_are_read_from_the_record(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    error = {"step": 1, "in_search": True, "allocated_bytes": GIB, "reserved_bytes": GIB}
    lines = [
        {"kind": "search", "stage": "", "text": "batch search · linear", "result": {"rows": 8}},
        {"kind": "out_of_memory", **error},
        {"kind": "message", "text": "no room:\u2028lower adaptive.memory_limit"},
    ]
    text = "\n".join(json.dumps(each, ensure_ascii=False) for each in lines)
    record.write_bytes(b"{\xff\n" + text.encode())
    found = RehearsalResult.read(record, usable_bytes=GIB, overhead_bytes=0, rank=0, ranks=1, status=1)
    assert found.verdict() == "does not fit: no room:\u2028lower adaptive.memory_limit"
    assert found.most_rows == 8
    fits = RehearsalResult(usable_bytes=GIB, overhead_bytes=0, rank=0, ranks=1, status=0, searches=found.searches)
    assert "batch search · linear" in fits.as_text().split("\n\n")


def test_ranks_that_were_not_compared_have_no_answer(tmp_path: Path) -> None:
    step = {"step": 1, "allocated_bytes": 1, "reserved_bytes": 1, "flushes": 0}
    for rank in "0", "1":
        records = [{"kind": "step", **step}, {"kind": "end", **step}, {"kind": "process", "status": 0}]
        (tmp_path / rank).write_text("\n".join(map(json.dumps, records)))
    about: dict[str, Any] = {"usable_bytes": GIB, "overhead_bytes": 0, "status": 0}
    assert RehearsalResult.read_ranks(tmp_path, **about).fits is None
    (tmp_path / COMPARED).write_text("{}")
    assert RehearsalResult.read_ranks(tmp_path, **about).fits


def test_recoveries_and_flushes_are_those_of_a_run_on_two_ranks() -> None:
    skip_without_null_device()
    found, ranks = rehearsed(12), trained(12)
    assert len(ranks) == 2
    for rank in ranks:
        assert errors_and_flushes(found) == errors_and_flushes(rank)
        assert found.steps == rank.steps
    assert sum(errors for errors, _ in errors_and_flushes(found)) > 0
    assert len({step["allocated_bytes"] for step in found.steps}) > 5
