"""The command that a prediction ends with."""

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.tune.plan.commands import Wanted, command, notes_on_samples
from torchtune_adaptive.tune.plan.question import PlanSettings, Question
from torchtune_adaptive.tune.start.command_line import locate

TOKENS = 256


def told(*given: str, config: str = "dpo", device: str = "cpu", **asked: Any) -> str:
    cfg = OmegaConf.load(locate(f"adaptive/demo/{config}"))
    cfg.device = device
    return command(Question(cfg, PlanSettings(**asked), "NAME", given), Wanted(4, TOKENS))


def of(cfg_as: dict[str, Any], config: str = "full", *, budget_fits: bool = False, **asked: Any) -> str:
    cfg = OmegaConf.merge(OmegaConf.load(locate(f"adaptive/demo/{config}")), OmegaConf.create(cfg_as))
    assert isinstance(cfg, DictConfig)
    return command(Question(cfg, PlanSettings(**asked), "NAME"), Wanted(4, TOKENS, budget_fits))


def test_it_trains_with_what_was_asked_about() -> None:
    given = ("world_size=2", "enable_activation_checkpointing=True", "format=table", "~loss.beta", "dataset.n=[1, 2]")
    assert told(*given, world_size=2) == (
        "tune run --nproc_per_node 2 adaptive_full_dpo_distributed --config NAME "
        "enable_activation_checkpointing=True '~loss.beta' 'dataset.n=[1, 2]' batch_size=4 use_maximum_batch_size=False"
    )


def test_of_a_key_that_the_answer_sets_the_answer_counts() -> None:
    assert told("batch_size=64", "epochs=2").endswith(" NAME batch_size=4 epochs=2 use_maximum_batch_size=False")


@pytest.mark.parametrize(
    ("device", "limit", "carried"), [("cpu", "18MiB", "18MiB"), ("cuda", "24GB", "null"), ("cpu", "h100", "79.1GiB")]
)
def test_a_run_has_the_limit_that_was_asked_about(device: str, limit: str, carried: str) -> None:
    command = told(f"memory_limit={limit}", "adaptive.memory_limit=1GiB", device=device, memory_limit=limit)
    assert f" memory_limit={limit}" not in command
    assert f"adaptive.memory_limit={carried} batch_size=4" in command


def test_a_gpu_is_told_no_limit_where_the_config_says_none() -> None:
    assert "memory_limit" not in of({"device": "cuda", "adaptive": None}, memory_limit="24GB")


def test_rows_are_no_longer_than_was_asked_about() -> None:
    longer = {"tokenizer": {"max_seq_len": 2 * TOKENS}}
    assert of(longer, sequence_length=TOKENS).endswith(f" tokenizer.max_seq_len={TOKENS}")
    assert "max_seq_len" not in of(longer)


def test_what_measures_is_given_the_length_and_cuts_nothing() -> None:
    by_tokens = {"use_maximum_batch_size": False, "adaptive": {"token_budget": 4096}}
    told = of(by_tokens, sequence_length=[128, TOKENS])
    assert told.endswith(f" NAME adaptive.token_budget=auto adaptive.sequence_length={TOKENS}")
    assert "token_budget" not in of(by_tokens, budget_fits=True), "as the config has it"
    told = of({}, "ppo", sequence_length=TOKENS)
    assert told.endswith(f" NAME use_maximum_batch_size=True adaptive.sequence_length={TOKENS}")


def test_packed_rows_have_the_length_that_was_asked_about() -> None:
    packed = {"use_maximum_batch_size": False, "adaptive": {"token_budget": "auto"}, "dataset": {"packed": True}}
    longer = {**packed, "tokenizer": {"max_seq_len": 2 * TOKENS}}
    assert of(longer, sequence_length=TOKENS).endswith(f"token_budget=auto tokenizer.max_seq_len={TOKENS}")


def test_a_length_that_the_config_has_is_not_said_again() -> None:
    assert "max_seq_len" not in of({"tokenizer": {"max_seq_len": TOKENS}}, sequence_length=TOKENS)


def test_a_batch_size_is_not_searched_for_anew() -> None:
    assert of({}).endswith(" NAME batch_size=4 use_maximum_batch_size=False")
    assert of({"use_maximum_batch_size": False}).endswith(" NAME batch_size=4")


@pytest.mark.parametrize(
    ("environment", "prefix"),
    [
        ({}, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True tune run"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False, roundup_power2_divisions:[256:1,512:2]"},
            "PYTORCH_CUDA_ALLOC_CONF='roundup_power2_divisions:[256:1,512:2],expandable_segments:True' tune run",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128,expandable_segments:False"},
            "PYTORCH_ALLOC_CONF=max_split_size_mb:128,expandable_segments:True tune run",
        ),
    ],
)
def test_the_allocator_is_set_as_was_asked_about(
    environment: dict[str, str], prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert of({"device": "cuda"}, expandable_segments=True).startswith(prefix)
    assert of({"device": "cpu"}, expandable_segments=True).startswith("tune run")
    assert of({"device": "cuda"}).startswith("tune run")


@pytest.mark.parametrize(
    ("ranks", "launcher"),
    [(8, "--nproc_per_node 8"), (12, "--nproc_per_node 12"), (16, "--nnodes 2 --nproc_per_node 8 --rdzv_backend c10d")],
)
def test_more_ranks_than_a_machine_has_are_on_several(ranks: int, launcher: str) -> None:
    assert of({}, world_size=ranks).startswith(f"tune run {launcher}")


def test_a_batch_size_that_changes_the_samples_of_a_step_is_told_of() -> None:
    cfg = OmegaConf.create({"batch_size": 2, "gradient_accumulation_steps": 4, "loss": None, "model": {}})
    (note,) = notes_on_samples(cfg, 8)
    assert note.startswith("batch_size=8 makes 32 samples a step on each rank, the config 8; ")
    assert notes_on_samples(cfg, 2) == notes_on_samples(cfg, 0) == []
    by_tokens = OmegaConf.merge(cfg, {"adaptive": {"token_budget": "auto"}})
    assert isinstance(by_tokens, DictConfig)
    assert notes_on_samples(by_tokens, 8) == []
