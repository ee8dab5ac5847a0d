"""Each trainer of TRL, stock and adaptive, in one process and under DDP: the table of docs/huggingface.md."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from tests.captured_logs import captured_log
from tests.hf.test_trainers import RANKS, texts, tokenizer
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.ranks import from_all_ranks

pytestmark = pytest.mark.timeout(1800)
STEPS = 4
SHORT: dict[str, Any] = {"max_length": 64}
GENERATES: dict[str, Any] = {"max_completion_length": 6, "top_k": 1}
CASES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "KTOTrainer in one process": ("trl", ["prompt", "completion"], SHORT),
    "KTOTrainer on several ranks": ("trl", ["prompt", "completion"], SHORT),
    "DistillationTrainer": ("trl", ["prompt"], GENERATES),
    "CPOTrainer": ("trl.experimental.cpo", ["prompt", "chosen", "rejected"], SHORT),
    "ORPOTrainer": ("trl.experimental.orpo", ["prompt", "chosen", "rejected"], SHORT),
    "TPOTrainer": ("trl.experimental.tpo", ["prompt", "chosen", "rejected", "reference"], SHORT),
    "GKDTrainer": ("trl.experimental.gkd", ["messages"], {**SHORT, "lmbda": 0.0, "max_new_tokens": 6}),
    "GKDTrainer on-policy": ("trl.experimental.gkd", ["messages"], {**SHORT, "lmbda": 1.0, "max_new_tokens": 6}),
    "IWOPDTrainer": ("trl.experimental.iw_opd", ["messages"], {"max_length": 64, "max_completion_length": 6}),
    "OnlineDPOTrainer": ("trl.experimental.online_dpo", ["prompt"], {"max_new_tokens": 6}),
    "GMPOTrainer": ("trl.experimental.gmpo", ["prompt"], {**GENERATES, "num_generations": 4}),
    "A2POTrainer": ("trl.experimental.a2po", ["prompt"], {"max_completion_length": 6, "num_value_samples": 2}),
    "SDFTTrainer": ("trl.experimental.sdft", ["prompt", "privileged_context"], GENERATES),
    "SDPOTrainer": ("trl.experimental.sdpo", ["prompt"], {**GENERATES, "num_generations": 4}),
}


def options(name: str, folder: Path) -> dict[str, Any]:
    """Arguments of a run, made for each run."""
    from tests.hf.trainers import arguments, tiny_llama

    module, columns, settings = CASES[name]
    kind = name.split()[0]
    imported = importlib.import_module(module)
    if columns == ["messages"]:
        data = texts(["prompt", "completion"]).map(
            lambda row: {
                "messages": [
                    {"role": "user", "content": row["prompt"]},
                    {"role": "assistant", "content": row["completion"]},
                ]
            },
            remove_columns=["prompt", "completion"],
        )
    else:
        data = texts(columns)
    if kind == "KTOTrainer":
        data = data.add_column("label", [number % 3 > 0 for number in range(len(data))])
    words = conversing_tokenizer()
    given: dict[str, Any] = {
        "base": getattr(imported, kind),
        "arguments": arguments(
            folder,
            getattr(imported, kind.replace("Trainer", "Config")),
            max_steps=STEPS,
            gradient_accumulation_steps=2,
            gradient_checkpointing=False,
            bf16=False,
            **settings,
        ),
        "model": str(folder / "model"),
        "data_collator": None,
        "processing_class": words,
        "train_dataset": data,
    }
    if kind in ("KTOTrainer", "OnlineDPOTrainer"):
        given["ref_model"] = tiny_llama()
    if kind in ("DistillationTrainer", "GKDTrainer", "IWOPDTrainer"):
        given["teacher_model"] = str(folder / "model")
    if kind in ("GMPOTrainer", "A2POTrainer", "SDPOTrainer", "OnlineDPOTrainer"):
        given["reward_funcs"] = many_letters
    return given


def conversing_tokenizer() -> Any:
    words = tokenizer()
    words.chat_template = "{% for each in messages %}{{ each['content'] }} {% endfor %}"
    return words


def many_letters(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(set(str(answer)))) for answer in completions]


def names_for(placement: str) -> list[str]:
    other = "on several ranks" if placement == "one process" else "in one process"
    return [name for name in CASES if not name.endswith(other)]


def outcomes(placement: str) -> dict[str, str]:
    """Collective: train each with stock, and with the mixin, which later runs out of memory in two steps."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    from tests.hf.trainers import difference, tiny_llama, train
    from torchtune_adaptive.errors import AdaptiveError
    from torchtune_adaptive.hf import AdaptiveArguments

    def outcome(name: str, folder: Path) -> str:
        with captured_log("torchtune_adaptive") as lines:
            stock = train(folder, **options(name, folder))
            try:
                healthy = train(folder, AdaptiveArguments(), **options(name, folder))
            except AdaptiveError as error:
                known = "does not call super", "one row per completion", "KTO's default loss on several ranks"
                return "refused" if any(each in str(error) for each in known) else str(error)
            assert difference(healthy, stock, least=1.0) < 1e-5, name
            if any("without recovery" in line for line in from_all_ranks(lines)[0]):
                return "without recovery"
            failing: dict[str, Any] = {"faults": [(2, 60), (3, 100)], "failing_rank": RANKS[placement] - 1}
            failed = train(folder, AdaptiveArguments(), **failing, **options(name, folder))
            assert difference(failed, stock, least=1.0) < 1e-5, name
            assert failed.log[-1]["oom_recoveries"] == 2, name
            return "recovers"

    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        for each in tiny_llama(), conversing_tokenizer():
            each.save_pretrained(folder / "model")
        return {name: outcome(name, folder) for name in names_for(placement)}


@pytest.mark.parametrize("placement", ["one process", "DDP"])
def test_each_trainer_has_the_result_of_the_table(placement: str) -> None:
    page = (Path(__file__).parents[2] / "docs/huggingface.md").read_text().partition("## Other trainers of TRL")[2]
    table = {
        name + more: result for name, more, result in re.findall(r"^\| `(\w+)`([ \w-]*?) \| ([\w ]+) \|", page, re.M)
    }
    assert table.keys() == CASES.keys()
    for found in run_on_ranks(RANKS[placement], outcomes, placement, in_group=False, timeout_s=300):
        assert found == {name: table[name] for name in names_for(placement)}
