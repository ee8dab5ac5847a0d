"""User errors give one message with the key, its value and the allowed values."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.forked_commands import tune_run_forked
from tests.recipes.running import assert_only_torchruns_report_follows, start_in_process
from torchtune_adaptive.config.command_line import locate
from torchtune_adaptive.errors import ConfigError

FULL, LORA = "full", "lora"
SMALL = "dataset.samples=16"

Start = Callable[..., str]


@pytest.fixture
def message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a recipe in an empty directory with an error in its config; return the error message."""
    monkeypatch.chdir(tmp_path)

    def start(kind: str, *overrides: str, config: str | None = None, train: bool = False) -> str:
        with pytest.raises(ConfigError) as caught:
            start_in_process(kind, "--config", config or f"adaptive/demo/{kind}", *overrides, train=train)
        return str(caught.value)

    return start


def assert_mentions(text: str, *parts: str) -> None:
    assert [part for part in parts if part not in text] == [], text
    lines = text.split("\n")  # one line per wrong value
    assert lines == list(dict.fromkeys(filter(None, lines))), text


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("a: [1\nb: 2", ["cannot be read", "line 2"]),
        ("a: 1\na: 2", ["cannot be read", "duplicate key a"]),
        ("a: ${b", ["cannot be read", "${b"]),
        ("", ["contains nothing", "must be a mapping"]),
        ("1: 2", ["a mapping with strings as keys"]),
        ("a: ${b}", ["a cannot be resolved", "'b' not found"]),
        ("a:\n  b: ${oc.env:NO_SUCH_VARIABLE}", ["a.b cannot be resolved", "NO_SUCH_VARIABLE"]),
        ("a: ???", ["a cannot be resolved", "mandatory"]),
    ],
)
def test_malformed_file_is_named_with_its_error(message: Start, tmp_path: Path, content: str, parts: list[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    named = [] if "resolved" in parts[0] else [f"--config {path}"]
    assert_mentions(message(FULL, config=str(path)), *named, *parts)


@pytest.mark.parametrize("arguments", [[], ["--config"], ["epochs=1"]])
def test_missing_config_is_an_error(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--config is missing"):
        start_in_process(FULL, *arguments)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("foo", ["foo", "key=value"]),
        ("--learning_rate=3", ["--learning_rate=3", "key=value"]),
        ("--config=adaptive/demo/lora", ["--config", "twice"]),
        ("~nothing", ["nothing", "Could not find key"]),
        ("tokenizer.max_seq_len=[1", ["expected"]),
    ],
)
def test_bad_override_is_named(message: Start, override: str, parts: list[str]) -> None:
    assert_mentions(message(FULL, override), *parts)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("epochs=0", ["epochs is 0", "a whole number from 1 to 100000"]),
        ("device=gpu", ["device is 'gpu'", "set device: cpu"]),
        ("optimizer_in_bwd=True", ["optimizer_in_bwd is True", "clip_grad_norm is 1.0"]),
        ("output_dir=/proc/none", ["cannot write to output_dir '/proc/none'"]),
    ],
)
def test_wrong_value_is_named_with_the_allowed_values(message: Start, override: str, parts: list[str]) -> None:
    assert_mentions(message(FULL, override, SMALL), *parts)


@pytest.mark.parametrize(
    "section", ["tokenizer", "dataset", "model", "checkpointer", "optimizer", "loss", "metric_logger"]
)
def test_missing_or_invalid_section_is_named(message: Start, tmp_path: Path, section: str) -> None:
    cfg = OmegaConf.load(locate("adaptive/demo/full"))
    del cfg[section]
    OmegaConf.save(cfg, tmp_path / "without.yaml")
    assert_mentions(message(FULL, config="without.yaml"), f"{section}", "is missing")
    cfg[section] = "torch.optim.AdamW"
    OmegaConf.save(cfg, tmp_path / "text.yaml")
    assert_mentions(message(FULL, config="text.yaml"), f"{section} is 'torch.optim.AdamW'", "allowed is a section")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optimizer=bitsandbytes.optim.PagedAdamW8bit", ["optimizer", "bitsandbytes", "installed"]),
        ("checkpointer.model_type=LAMA", ["checkpointer could not be built", "KeyError: 'LAMA'"]),
        ("checkpointer.checkpoint_files=[none.pt]", ["checkpointer", "weights is not a valid directory"]),
        *((f"checkpointer.checkpoint_files={value}", ["checkpointer"]) for value in ("x", "null", "[]")),
        (
            "checkpointer=torchtune.training.FullModelHFCheckpointer checkpointer.checkpoint_dir=/nowhere/Llama",
            ["checkpointer.checkpoint_dir is '/nowhere/Llama'", "tune download"],
        ),
        ("checkpointer.checkpoint_dir=None", ["checkpointer.checkpoint_dir is None"]),
    ],
)
def test_component_that_cannot_be_built_is_named(message: Start, override: str, parts: list[str]) -> None:
    assert_mentions(message(FULL, *override.split(), SMALL), *parts)


def test_missing_data_file_is_named(message: Start) -> None:
    data = (
        "dataset=torchtune.datasets.instruct_dataset",
        "dataset.source=json",
        "dataset.data_files=/nowhere/rows.json",
    )
    assert_mentions(message(FULL, *data), "dataset could not be built", "Unable to find '/nowhere/rows.json'")
    wrong = ("dataset=torchtune.datasets.instruct_dataset", "dataset.source=json", "dataset.samples=3")
    assert_mentions(message(FULL, *wrong), "unexpected keyword argument 'samples'", "remove it", "'~dataset.samples'")


@pytest.mark.parametrize(
    ("kind", "override", "found"),
    [
        (FULL, "model.embed_dim=64", "size mismatch"),
        (LORA, "model.num_layers=4", "layers.3"),
    ],
)
def test_weights_of_another_model_are_refused(message: Start, kind: str, override: str, found: str) -> None:
    assert_mentions(message(kind, override), "checkpointer: the weights do not match the model", found)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optimizer_in_bwd=True", ["optimizer_in_bwd is True", "LoRA"]),
        ("~model.lora_rank", ["model.lora_rank is missing"]),
        ("model.lora_attn_modules=[query]", ["model.lora_attn_modules is ['query']", "q_proj"]),
    ],
)
def test_options_unsupported_with_lora_are_refused_before_training(
    message: Start, override: str, parts: list[str]
) -> None:
    assert_mentions(message(LORA, override), *parts)


A_SLIP = "batch_szie is not a known key: did you mean batch_size?"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(["batch_szie=8"], A_SLIP, id="before-the-process-group"),
        pytest.param(["model.embed_dim=64"], "checkpointer: the weights do not match the model", id="in-a-collective"),
        pytest.param(["metric_logger=nowhere.log"], "metric_logger could not be built", id="on-rank-0-only"),
    ],
)
def test_two_ranks_end_promptly_with_one_message(tmp_path: Path, overrides: list[str], message: str) -> None:
    config = ("adaptive_full_finetune_distributed", "--config", "adaptive/demo/full")
    ended = tune_run_forked(*config, *overrides, ranks=2, cwd=tmp_path, timeout_s=60)
    assert ended.status != 0
    (shown,) = re.findall(r"^error.*$", ended.output, re.MULTILINE)
    assert re.match(rf"error(?: \(rank 1\))?: {re.escape(message)}", shown)
    assert_only_torchruns_report_follows(shown, ended.output)
    assert (tmp_path / "runs").exists() == (A_SLIP not in message), "before it begins"
