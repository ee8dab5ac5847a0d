"""`adaptive_plan`: its traces against what the recipes really allocate on CPUs, and what a user gets to see."""

from __future__ import annotations

import csv
import gc
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import adaptive_plan
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from tests.commands import tune_run_here
from tests.pictures import cut_off, is_drawn, marked, names_of, pictures
from tests.ranks import run_on_ranks
from tests.recipes.metering import metered, profiled
from tests.recipes.running import STOCK, demo_config, load_ours
from tests.recipes.tracing import fake_step
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.memory.device import plain_tensors
from torchtune_adaptive.memory.meter import MemoryMeter
from torchtune_adaptive.prediction.law import peak_of, sizes_of
from torchtune_adaptive.prediction.recorder import Recorder, Workspace
from torchtune_adaptive.tune.parts import process_group
from torchtune_adaptive.tune.parts.memory_limit import resident_tensors
from torchtune_adaptive.tune.parts.preference import POLICY, REFERENCE
from torchtune_adaptive.tune.parts.samples import TEXT
from torchtune_adaptive.tune.start.command_line import locate, read_command_line
from torchtune_adaptive.tune.trace import fakes
from torchtune_adaptive.tune.trace.fakes import FakeStep

TOLERANCE = 0.001
LAYERS = 3
# checkpointing keeps the random generator's state for each layer, and while it runs one again; it does so on the host,
# where a prediction for a GPU has nothing to count
RNG_BYTES = (LAYERS + 2) * torch.get_rng_state().nbytes
SIZES = ((1, 1024), (5, 512), (9, 384))
NO_ACCUMULATION = ("gradient_accumulation_steps=1", "clip_grad_norm=null")
# so that a shard of each projection is whole blocks of 64 weights in whole blocks of 256 scalers
NF4_SIZES = ("embed_dim=256", "intermediate_dim=512", "num_kv_heads=4")
WIDE_ENOUGH_FOR_NF4 = [f"{section}.{size}" for section in ("model", "checkpointer.sizes") for size in NF4_SIZES]
# torchtune counts the layers that it has met since the process began: only every third is the same one in each model
CONFIGS = {
    "full": ("full",),
    "full, checkpointed": ("full", "enable_activation_checkpointing=True"),
    "full, one microbatch": ("full", *NO_ACCUMULATION),
    "full, without padding": ("full", "adaptive.token_budget=4096", "enable_activation_checkpointing=True"),
    "full, for-loop optimizer, bf16": ("full", "optimizer.fused=False", "dtype=bf16"),
    "full, selective checkpointing": ("full", "ac_mode=selective", f"ac_option={LAYERS}"),
    "lora": ("lora",),
    "qlora": ("lora", "dtype=bf16", "model.quantize_base=True", *WIDE_ENOUGH_FOR_NF4),
    "lora, checkpointed": ("lora", "enable_activation_checkpointing=True", "model.apply_lora_to_output=True"),
}


@contextmanager
def recipe_step(kind: str, cfg: DictConfig) -> Iterator[tuple[Any, Callable[[int, int], None]]]:
    """Collective: a recipe that is set up and warm, and its step with so many rows of so many tokens."""
    recipe = load_ours(kind)(cfg)
    recipe.setup()

    def step(rows: int, tokens: int) -> None:
        sample = {"tokens": [0] * tokens, "labels": [0] * tokens}
        first = [[TEXT.stand_in(sample)]] if cfg.gradient_accumulation_steps > 1 else []
        result = recipe.runner.attempt([*first, [sample] * rows]).result
        recipe.optimization.update(result.target_tokens)

    step(1, 16)
    gc.collect()
    try:
        yield recipe, step
    finally:
        recipe.cleanup()


def profiled_peaks(kind: str, cfg: DictConfig) -> list[int]:
    """What torch's profiler sees of real steps, beside what is resident."""
    with recipe_step(kind, cfg) as (recipe, step):
        meter = MemoryMeter()
        meter.count(resident_tensors(recipe.model, recipe.optimization.optimizers))
        return [meter.live_bytes + profiled(lambda size=size: step(*size)) for size in SIZES]


def metered_peaks(kind: str, cfg: DictConfig, of: type[MemoryMeter] = MemoryMeter) -> list[int]:
    """Collective: what the recipes' own meter, or another, counts on this rank."""
    peaks = []
    with recipe_step(kind, cfg) as (recipe, step):
        for size in SIZES:
            resident = resident_tensors(recipe.model, recipe.optimization.optimizers)
            peaks.append(metered(lambda size=size: step(*size), resident, of))
    return peaks


def predicted_peaks(cfg: DictConfig, world_size: int, workspaces: Mapping[Any, Workspace] | None = None) -> list[int]:
    """`workspaces`: what kernels take for themselves, where the witness sees that."""
    recorder = mock.patch.object(fakes, "Recorder", lambda _, counter: Recorder(workspaces or {}, counter))
    with fake_step(cfg, world_size) as step, recorder:
        recordings = [step.record(*size) for size in SIZES]
    return [peak_of(each.phases, sizes_of(each), caches=False).peak_bytes for each in recordings]


def about(peak: int) -> Any:
    return pytest.approx(peak, rel=TOLERANCE, abs=RNG_BYTES)


@pytest.mark.parametrize("name", CONFIGS)
def test_one_process_allocates_what_was_predicted(name: str, tmp_path: Path) -> None:
    kind, *overrides = CONFIGS[name]
    cfg = demo_config(kind, tmp_path / "run", *overrides)
    try:
        real = profiled_peaks(kind, cfg)
    finally:
        process_group.leave()
    assert predicted_peaks(cfg, world_size=1) == [about(peak) for peak in real]


@pytest.mark.parametrize(
    "name", ["full", "full, checkpointed", "full, without padding", "full, one microbatch", "lora", "qlora"]
)
def test_two_ranks_with_fsdp_allocate_what_was_predicted(name: str, tmp_path: Path) -> None:
    kind, *overrides = CONFIGS[name]
    cfg = demo_config(kind, tmp_path / "run", *overrides)
    real = run_on_ranks(2, metered_peaks, kind, cfg, timeout_s=120, in_group=False)
    predicted = predicted_peaks(cfg, world_size=2)
    for rank in real:
        assert predicted == [about(peak) for peak in rank]


def direct_peak_gib(config: Path, rows: int, tokens: int, *overrides: str) -> float:
    """Of one step in one process, as it is traced, without a law."""
    cfg = OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_dotlist([*overrides]))
    assert isinstance(cfg, DictConfig)
    with fake_step(cfg, world_size=1) as step:
        recording = step.record(rows, tokens)
    peak_bytes = peak_of(recording.phases, sizes_of(recording), caches=True).peak_bytes
    assert peak_bytes is not None
    return peak_bytes / 2**30


def test_a_peak_that_torchtunes_readme_gives() -> None:
    """Llama 3.2 3B, one A100, packed to 4096 tokens, 2 rows, nothing else: 60.0 GiB in bf16."""
    overrides = (
        "dataset.packed=True",
        "loss._component_=torch.nn.CrossEntropyLoss",
        "enable_activation_checkpointing=False",
        "gradient_accumulation_steps=1",
        "optimizer.fused=True",
    )
    peak = direct_peak_gib(locate("adaptive/llama3_2/3B_full"), 2, 4096, *overrides)
    assert peak == pytest.approx(60.0, rel=0.05)


class LossOfTorchtune01(nn.CrossEntropyLoss):
    """Recipes of that version kept a copy of the logits, without the last position, through the backward."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.kept = logits[:-4].contiguous()
        return super().forward(self.kept, labels[:-4])


def test_a_peak_that_a_pull_request_of_torchtunes_gives() -> None:
    """#961: Llama 2 7B, 7B_full_low_memory, 4 rows of 2048 tokens: 20.2 GB.

    The state of PagedAdamW is not the caching allocator's: SGD has as little there.
    """
    overrides = (
        "optimizer._component_=torch.optim.SGD",
        "enable_activation_offloading=False",
        f"loss._component_={__name__}.{LossOfTorchtune01.__name__}",
    )
    peak = direct_peak_gib(STOCK / "configs" / "llama2" / "7B_full_low_memory.yaml", 4, 2048, *overrides)
    assert peak == pytest.approx(20.2e9 / 2**30, rel=0.01)


def ask(*arguments: str) -> None:
    """The command in this process."""
    with mock.patch.object(sys, "argv", ["adaptive_plan", "--config", *arguments]):
        adaptive_plan.answer(read_command_line(sys.argv))


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
    assert "1.0 GiB are assumed" in output


@pytest.mark.parametrize("form", ["csv", "json"])
def test_figures_for_programs(form: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    ask("adaptive/demo/lora", f"format={form}", "sequence_length=[128,256]", "memory_limit=64MiB")
    output, beside = capsys.readouterr()
    note = "this is for 1 rank, though the launcher starts 2: give world_size=2 for those"
    assert note in json.loads(output)["notes"] if form == "json" else f"note: {note}\n" in beside
    rows = json.loads(output)["predictions"] if form == "json" else list(csv.DictReader(io.StringIO(output)))
    assert list(dict.fromkeys(int(row["tokens"]) for row in rows)) == [128, 256]
    chosen = [int(row["rows"]) for row in rows if str(row["chosen"]) == "True"]
    assert chosen[0] == 2 * chosen[1]
    if form == "json":
        commands = json.loads(output)["commands"]
        for most, line in zip(chosen, commands, strict=True):
            assert f" batch_size={most}" in line
        assert [row.get("command") for row in rows if row["chosen"]] == commands
        assert any("makes" in note and "samples a step of each rank" in note for note in json.loads(output)["notes"])
        assert abs(json.loads(output)["largest_error"]) < 0.005


def test_a_length_that_the_chunks_of_the_loss_do_not_divide_is_rounded_up(capsys: pytest.CaptureFixture[str]) -> None:
    ask("adaptive/demo/full", "format=json", "sequence_length=[97,104]", "memory_limit=64MiB", "advise=False")
    found = json.loads(capsys.readouterr().out)
    odd, even = ([row for row in found["predictions"] if row["tokens"] == tokens] for tokens in (97, 104))
    for row in found["predictions"]:
        row.pop("command", None)
    assert [{**row, "tokens": 104} for row in odd] == even
    assert "lengths are rounded up to a multiple of 8, the chunks of the loss" in found["notes"]


@pytest.mark.parametrize(("budget", "fits"), [("auto", "fit"), ("1024", "fits"), ("2000", "does not fit")])
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
    ask("adaptive/demo/dpo", "world_size=[1,2]", "memory_limit=64MiB", "format=csv", "sequence_length=64")
    (first, *_) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (first["stage"], first["tokens_per_s"], first["tokens_per_s_from"]) == (POLICY, "", "")


def test_the_answer_is_there_before_the_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(others: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchtune_adaptive.tune.plan.advice.what_fits", stopped)
    with pytest.raises(KeyboardInterrupt):
        ask("adaptive/demo/full", "memory_limit=8MiB")
    assert "does not fit in 8.0 MiB: one row of 256 tokens needs" in capsys.readouterr().out


def test_advice_is_on_the_length_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "torchtune_adaptive.tune.plan.advice.what_fits", lambda others: asked.append(others.as_it_is.tokens) or []
    )
    ask("adaptive/demo/full", "memory_limit=11MiB", "sequence_length=[64,256]")
    output = capsys.readouterr().out
    assert asked == [256]
    assert output.index("does not fit in 11.0 MiB: one row of 256") < output.index("nothing that was tried fits")


def test_csv_is_not_kept_waiting_for_advice_that_it_cannot_hold(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtune_adaptive.tune.plan.advice.what_fits", lambda others: pytest.fail("traced"))
    ask("adaptive/demo/full", "format=csv", "memory_limit=8MiB")
    assert list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


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
    assert "layers backward" in names_of(memory)
    (most,) = frontier.lines  # no rows fit with allocator retries only
    tokens, rows = map(list, most.get_data())
    assert tokens == sorted(tokens)
    assert rows == sorted(rows, reverse=True)
    assert cut_off(drawn[0]) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("memory_limit=0.9",), "a fraction needs a device"),
        (("memory_limit=2MiB", "device=cuda", "dtype=bf16"), "are not for tensors"),
        (("adaptive=null",), "nothing to fit into"),
        (("sequence_length=4096",), "takes at most 2048"),
        (("tensor_parallel_dim=2", "tensor_parallel_plan=x", "optimizer.fused=False"), "tensor_parallel_dim is 2"),
        (("dataset.packed=True",), "dataset.packed on a CPU"),
        (("format=yaml",), "allowed is table or csv or json"),
        (("format=csv", "advise=True"), "advise is True and format is csv, which has no rows for advice"),
        (("world_size=[1,2]", "picture=plan.png"), "picture draws the answer for one number of ranks"),
        (("link_bandwidth=h100",), "link_bandwidth: cannot read 'h100'"),
        (("use_maximum_batch_size=True", "adaptive.token_budget=auto"), "both say what fits"),
        (("adaptive.precompute_reference=True",), "finetuning has no reference"),
        (("world_size=[2,3]", "data_parallel_replicate_dim=2"), "the world size is 3"),
        (("teacher_model._component_=torchtune_adaptive.demo.model.demo_model",), "distils one model into another"),
    ],
)
def test_what_cannot_be_answered_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask("adaptive/demo/full", *overrides)


ON_GPU = ("device=cuda", "dtype=bf16", "gradient_accumulation_steps=1", "clip_grad_norm=null")


def predicted_phases(cfg: DictConfig, world_size: int) -> tuple[dict[str, int], int, int]:
    """The peak of each phase; bytes of weights and optimizer state, wherever they are; what is kept on the host."""
    with fake_step(cfg, world_size) as step:
        recording = step.record(rows=4, tokens=512)
        peak = peak_of(recording.phases, sizes_of(recording), caches=False)
        return dict(peak.phase_bytes), weights_and_state(step), step.host_bytes


def weights_and_state(step: FakeStep) -> int:
    tensors = resident_tensors(step.model, step.optimizers)
    buffers = {id(buffer) for buffer in step.model.buffers()}
    plain = [each for tensor in tensors if id(tensor) not in buffers for each in plain_tensors(tensor)]
    return sum(each.untyped_storage().nbytes() for each in plain)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_offloading_takes_weights_and_optimizer_state_off_the_device(kind: str, tmp_path: Path) -> None:
    """Nothing else differs: the shards that come to be gathered are gone before anything peaks."""
    kept, stays, _ = predicted_phases(demo_config(kind, tmp_path / "run", *ON_GPU), 2)
    offloaded, goes, on_host = predicted_phases(
        demo_config(kind, tmp_path / "run", *ON_GPU, "fsdp_cpu_offload=True"), 2
    )
    assert stays == goes < on_host
    shared = [phase for phase in kept if phase.endswith(("ward", "loss"))]
    assert len(shared) == 5
    assert {phase: offloaded[phase] for phase in shared} == {phase: kept[phase] - stays for phase in shared}
    assert "update" not in offloaded, "the optimizer works on the host"


def test_offloaded_gradients_are_on_the_host(tmp_path: Path) -> None:
    """Full: weights, gradients and two moments are of the same size, but for the optimizer's numbers of steps."""
    cfg = demo_config("full", tmp_path / "run", *ON_GPU, "fsdp_cpu_offload=True")
    _, weights_and_moments, on_host = predicted_phases(cfg, 2)
    assert on_host == pytest.approx(4 / 3 * weights_and_moments, rel=0.001)


@pytest.mark.parametrize("found", ["use_maximum_batch_size=True", "adaptive.token_budget=4096"])
def test_where_a_run_may_split_its_step_gradients_lie_beside_the_largest_microbatch(found: str, tmp_path: Path) -> None:
    """As in the search's own probes, though the config says one microbatch."""
    rows = ("adaptive.padding=True",)
    once, several = (
        predicted_phases(demo_config("full", tmp_path / "run", *NO_ACCUMULATION[1:], *rows, steps, *more), 1)[0]
        for steps, more in (("gradient_accumulation_steps=1", (found,)), ("gradient_accumulation_steps=2", ()))
    )
    assert once == several


def test_shards_of_a_thousand_ranks_are_small(tmp_path: Path) -> None:
    cfg = demo_config("full", tmp_path / "run", *ON_GPU)
    (_, few, _), (_, many, _) = predicted_phases(cfg, 8), predicted_phases(cfg, 1024)
    assert few / 128 < many < few / 16, "rounded up to whole rows of each weight"


def test_a_config_without_any_length_is_answered_for_an_assumed_one(capsys: pytest.CaptureFixture[str]) -> None:
    ask("adaptive/demo/full", "adaptive=null", "memory_limit=1GiB", "tokenizer.max_seq_len=null")
    output = capsys.readouterr().out
    assert "2048 tokens" in output.splitlines()[0], "the most that the demo's model takes, which is less than 4096"
    assert "note: no sequence_length is given: 2048 tokens are assumed" in output


@pytest.mark.parametrize(("card", "warned"), [("V100", True), ("h100", False)])
def test_a_card_without_the_kernels_that_are_assumed_is_answered_with_a_note(
    capsys: pytest.CaptureFixture[str], card: str, warned: bool
) -> None:
    ask("adaptive/demo/full", *ON_GPU, f"memory_limit={card}")
    note = f"note: {card} has neither bf16 nor flash attention, which are assumed: it may need more"
    assert (note in capsys.readouterr().out) == warned


def test_expandable_segments_reserve_less(capsys: pytest.CaptureFixture[str]) -> None:
    reserved = {}
    for expandable in (False, True):
        ask("adaptive/demo/full", *ON_GPU, "memory_limit=8GiB", "format=json", f"expandable_segments={expandable}")
        answer = json.loads(capsys.readouterr().out)
        assert f"the caching allocator is replayed with expandable_segments:{expandable}" in answer["notes"]
        reserved[expandable] = {row["rows"]: row["reserved_bytes"] for row in answer["predictions"]}
    assert reserved[True][256] < 0.95 * reserved[False][256]
