"""`adaptive_plan`: what a user gets to see, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.commands import tune_run_here
from tests.pictures import cut_off, is_drawn, line_of, marked, pictures
from tests.recipes.plan.test_plan import ask
from tests.recipes.running import STOCK
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.parts.preference_stages import POLICY, REFERENCE


def test_the_command_answers_with_a_table_and_what_to_run_next(tmp_path: Path) -> None:
    arguments = ("--config", "adaptive/demo/full", "world_size=2")
    ended = tune_run_here("adaptive_plan", *arguments, ranks=None, cwd=tmp_path, timeout_s=200)
    assert ended.status == 0, ended.output
    assert "demo_model · full · 2 ranks · 256 tokens · 64.0 MiB usable of 64.0 MiB" in ended.output
    assert "<- most without allocator retries" in ended.output
    assert re.search(r"^batch_size: 8$|^batch_size: 8 \(\d+ fit, rounded down", ended.output, re.MULTILINE)
    assert "adaptive_full_finetune_distributed --config adaptive/demo/full batch_size=8" in ended.output
    assert not list(tmp_path.iterdir()), "a prediction leaves nothing behind"


def test_a_config_of_torchtunes_needs_no_weights_tokenizer_or_data(capsys: pytest.CaptureFixture[str]) -> None:
    stock = STOCK / "configs" / "llama3_2" / "1B_full.yaml"
    small = "model._component_=torchtune_adaptive.demo.model.demo_model"
    ask(str(stock), small, "memory_limit=4090", "sequence_length=512")
    output = capsys.readouterr().out
    assert "22.6 GiB usable of 23.6 GiB" in output
    assert f"--config llama3_2/1B_full {small} batch_size=" in output
    assert "1.0 GiB is assumed" in output


def test_figures_for_programs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    ask("adaptive/demo/lora", "format=json", "sequence_length=[128,256]", "memory_limit=64MiB")
    answer = json.loads(capsys.readouterr().out)
    assert "this answer is for 1 rank, but the launcher starts 2: set world_size=2 for those" in answer["notes"]
    assert any("makes" in note and "samples a step on each rank" in note for note in answer["notes"])
    rows = answer["predictions"]
    assert list(dict.fromkeys(row["tokens"] for row in rows)) == [128, 256]
    chosen = [row["rows"] for row in rows if row["chosen"]]
    assert chosen[0] == 2 * chosen[1]
    for most, line in zip(chosen, answer["commands"], strict=True):
        assert f" batch_size={most}" in line
    assert [row.get("command") for row in rows if row["chosen"]] == answer["commands"]
    assert abs(answer["largest_error"]) < 0.005


@pytest.mark.parametrize(("budget", "fits"), [("auto", "fit"), ("2000", "does not fit")])
def test_a_token_budget_is_answered_in_tokens(budget: str, fits: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask("adaptive/demo/tokens", f"adaptive.token_budget={budget}", "sequence_length=100", "memory_limit=64MiB")
    output = capsys.readouterr().out
    tokens, rows = map(int, re.findall(r"(\d+)(?: fit)? \((\d+) rows of 100 tokens\)", output)[0])
    assert tokens == 100 * rows
    assert re.search(rf"^adaptive.token_budget: \d+ {fits}\b", output, re.MULTILINE)
    assert "batch_size" not in output
    ask("adaptive/demo/tokens", f"adaptive.token_budget={budget}", "sequence_length=100", "format=json")
    (told,) = json.loads(capsys.readouterr().out)["token_budgets"]
    asked = budget if budget == "auto" else int(budget)
    assert told == {"tokens": 100, "token_budget": asked, "fits": fits != "does not fit", "most_tokens": tokens}


def test_several_numbers_of_ranks_are_answered_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    ask("adaptive/demo/dpo", "world_size=[1,2]", "memory_limit=64MiB", "format=json", "sequence_length=64")
    found = json.loads(capsys.readouterr().out)
    told = [(row["ranks"], row["stage"]) for row in found["predictions"]]
    assert told == [(ranks, stage) for ranks in (1, 2) for stage in (POLICY, REFERENCE)]
    assert {row["tokens_per_s"] for row in found["predictions"]} == {None}
    assert abs(found["largest_error"]) < 0.005
    assert all(f"--nproc_per_node {ranks} " in line for ranks, line in zip((1, 2), found["commands"], strict=True))


def test_a_budget_that_is_too_small_is_answered_with_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    ask("adaptive/demo/full", "memory_limit=8MiB", "advise=False")
    output = capsys.readouterr().out
    assert "does not fit" in output
    assert "one row does not fit: lower sequence_length" in output
    assert "batch_size:" not in output


def test_a_picture_is_drawn_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = pictures(monkeypatch)
    ask("adaptive/demo/full", f"picture={tmp_path / 'plan.png'}")
    assert is_drawn(tmp_path / "plan.png")
    memory, frontier = drawn[0].axes
    assert (memory.get_xlabel(), frontier.get_xlabel()) == ("rows in a microbatch", "tokens in a row")
    assert memory.get_ylabel().startswith("peak memory of a rank (")
    assert marked(memory, "o")[0][0] == 1  # what is reserved for one row, and for more
    tokens, rows = line_of(frontier, "without")
    assert tokens == sorted(tokens)
    assert rows == sorted(rows, reverse=True)
    assert cut_off(drawn[0]) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("memory_limit=0.9",), "a fraction needs a device"),
        (("memory_limit=2MiB", "device=cuda", "dtype=bf16"), "nothing is left for tensors"),
        (("adaptive=null",), "memory_limit is null"),
        (("sequence_length=4096",), "takes at most 2048"),
        (("tensor_parallel_dim=2", "tensor_parallel_plan=x", "optimizer.fused=False"), "tensor_parallel_dim is 2"),
        (("dataset.packed=True",), "dataset.packed on a CPU"),
        (("format=yaml",), "allowed is table or json"),
        (("world_size=[1,2]", "picture=plan.png"), "picture draws the answer for one number of ranks"),
        (("link_bandwidth=h100",), "link_bandwidth: cannot read 'h100'"),
        (("use_maximum_batch_size=True", "adaptive.token_budget=auto"), "limited by rows or by tokens"),
        (("adaptive.precompute_reference=True",), "finetuning has no reference"),
        (("world_size=[2,3]", "data_parallel_replicate_dim=2"), "the world size is 3"),
        (
            ("teacher_model._component_=torchtune_adaptive.demo.model.demo_model",),
            "predictions do not cover distillation",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask("adaptive/demo/full", *overrides)


def test_a_config_without_any_length_is_answered_for_an_assumed_one(capsys: pytest.CaptureFixture[str]) -> None:
    ask("adaptive/demo/full", "adaptive=null", "memory_limit=1GiB", "tokenizer.max_seq_len=null")
    output = capsys.readouterr().out
    assert "2048 tokens" in output.splitlines()[0], "the most that the demo's model takes, which is less than 4096"
    assert "note: sequence_length is not set: assuming 2048 tokens" in output
