"""Any config gives one error per wrong value that names it, or a run that is set up; no traceback, no hang."""

import json
import os
import resource
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ranks import run_on_ranks
from tests.recipes.running import Ended, start_as_command, start_in_process
from torchtune_adaptive.config.keys import AdaptiveConfig, Settings
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.loop.training_loop import TrainingLoop

DEMO = "adaptive/demo/full"
INSTRUCTIONS = "dataset=torchtune.datasets.instruct_dataset dataset.source=json"
HUB = "checkpointer=torchtune.training.FullModelHFCheckpointer checkpointer.checkpoint_dir=/nowhere/Llama"
PARTS = ("tokenizer", "dataset", "model", "checkpointer", "optimizer", "loss", "metric_logger")
ERRORS = {
    # overrides of the demo's config -> parts of the message: the key with its value, and what only the cause can tell
    "foo": ("foo", "key=value"),
    "--config=adaptive/demo/lora": ("--config", "twice"),
    "~nothing": ("nothing",),
    "epochs=0": ("epochs is 0",),
    "device=gpu": ("device is 'gpu'", "device: cpu"),
    "optimizer_in_bwd=True": ("optimizer_in_bwd is True", "clip_grad_norm is 1.0"),
    "output_dir=/proc/none": ("output_dir '/proc/none'",),
    **{f"~{part}": (f"{part} is missing",) for part in PARTS},
    "optimizer=bitsandbytes.optim.PagedAdamW8bit": ("optimizer", "bitsandbytes", "installed"),
    "checkpointer.model_type=LAMA": ("checkpointer", "LAMA"),
    **{f"checkpointer.checkpoint_files={value}": ("checkpointer",) for value in ("x", "null", "[]", "[none.pt]")},
    "checkpointer.checkpoint_dir=None": ("checkpointer.checkpoint_dir is None",),
    HUB: ("checkpointer.checkpoint_dir is '/nowhere/Llama'", "tune download"),
    f"{INSTRUCTIONS} dataset.data_files=/nowhere/rows.json ~dataset.samples": ("dataset", "/nowhere/rows.json"),
    INSTRUCTIONS: ("dataset", "'samples'"),
    "model.embed_dim=64": ("checkpointer", "size mismatch"),
}
OF_LORA = {
    "model.num_layers=4": ("checkpointer", "layers.3"),
    "~model.lora_rank": ("model.lora_rank is missing",),
    "model.lora_attn_modules=[query]": ("model.lora_attn_modules is ['query']", "q_proj"),
    "optimizer_in_bwd=True": ("optimizer_in_bwd is True", "LoRA"),
}
FILES = {
    "a: [1\nb: 2": ("mine.yaml", "line 2"),
    "a: 1\na: 2": ("mine.yaml", "key a"),
    "a: ${b": ("mine.yaml", "${b"),
    "": ("mine.yaml", "mapping"),
    "1: 2": ("mine.yaml", "mapping"),
    "a:\n  b: ${oc.env:NO_SUCH_VARIABLE}": ("a.b", "NO_SUCH_VARIABLE"),
    "a: ???": ("a ", "mandatory"),
}


@pytest.mark.parametrize(
    ("kind", "arguments", "content", "parts"),
    [
        ("full", "", "", ("--config",)),
        *(("full", f"--config {DEMO} {overrides}", "", parts) for overrides, parts in ERRORS.items()),
        *(("lora", f"--config adaptive/demo/lora {overrides}", "", parts) for overrides, parts in OF_LORA.items()),
        *(("full", "--config mine.yaml", content, parts) for content, parts in FILES.items()),
    ],
)
def test_user_error_names_its_key_and_value_or_its_file(
    kind: str, arguments: str, content: str, parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        start_in_process(kind, *arguments.split())
    assert [part for part in parts if part not in str(caught.value)] == []
    lines = str(caught.value).split("\n")  # one line per wrong value
    assert lines == list(dict.fromkeys(filter(None, lines)))


MOST_BYTES = 2 * 2**30
"""Allowed in addition to the memory mapped at the start."""
ADAPTIVE_KEYS = [field.name for field in fields(AdaptiveConfig)]
KEYS = [
    *(field.name for field in fields(Settings)),
    *ADAPTIVE_KEYS,
    *(f"adaptive.{name}" for name in ADAPTIVE_KEYS),
    *("adaptive", "batch_increase_function", "model", "optimizer", "dataset", "loss", "profiler", "lr_scheduler"),
    *("profiler.enabled", "checkpointer.output_dir", "checkpointer.checkpoint_dir", "optimizer.mine"),
]
NUMBERS = st.one_of(
    st.integers(-3, 3), st.sampled_from([2**31, 2**63, 10**9, 10**30, -(10**30)]), st.floats(allow_infinity=True)
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text("ab.,:/$0 ", max_size=6), st.just("${nothing}"))
VALUES = st.one_of(
    SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.sampled_from(["a", "_component_"]), SCALARS, max_size=2)
)


def as_yaml(value: Any) -> str:
    """Format a value as YAML; JSON is YAML except for three numbers."""
    text = json.dumps(value)
    for json_name, yaml_name in (("-Infinity", "-.inf"), ("Infinity", ".inf"), ("NaN", ".nan")):
        text = text.replace(json_name, yaml_name)
    return text


def only_set_up(folder: Path, override: str) -> Ended:
    os.chdir(folder)
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + MOST_BYTES,) * 2)
    small = ("--config", DEMO, "dataset.samples=16", "output_dir=out", "use_maximum_batch_size=False")
    with mock.patch.object(TrainingLoop, "training", return_value=nullcontext(())):
        return start_as_command("full", [*small, override], folder / "output.txt")


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_any_value_of_any_key_is_accepted_or_reported_with_its_key(key: str, value: Any) -> None:
    with TemporaryDirectory() as folder:
        override = f"{key}={as_yaml(value)}"
        [ended] = run_on_ranks(1, only_set_up, Path(folder), override, timeout_s=100, in_group=False)
    assert ended.status in (0, 1)
    assert "Traceback" not in ended.output
    errors = [line for line in ended.output.splitlines() if line.startswith("error")]
    assert len(errors) == ended.status
    assert all(key in error for error in errors)
