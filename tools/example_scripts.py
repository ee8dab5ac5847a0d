"""Rehearses TRL's scripts with models of their real sizes and random weights, for docs/which-config-fits.md.

It runs in the environment of `make test-hf`. Results are kept, so the command can be stopped and continued.

python -m tools.example_scripts FOLDER    # of a copy of TRL's repository, for the scripts that its wheel lacks
python -m tools.which_config_fits --page  # writes the page
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results import RESULTS, save
from tests.foreign.scripts.models import qwen2_half_billion, save_tokenizer
from torchtune_adaptive.rehearse import rehearse

NAME = "example_scripts"
GPU = "h100"
NOTE = "TRL's scripts with random weights, one GPU: tools/example_scripts.py"
WORDS = " ".join(["the quick brown fox jumps over the lazy dog"] * 60)
QUESTION, ANSWER = ([{"role": role, "content": WORDS}] for role in ("user", "assistant"))
ROW = {"messages": QUESTION + ANSWER}
PREFERENCE = {"prompt": QUESTION, "chosen": ANSWER, "rejected": ANSWER}
LABELLED = {"prompt": QUESTION, "completion": ANSWER, "label": True}
PROMPT = {"prompt": QUESTION}
PAIR = {"chosen": QUESTION + ANSWER, "rejected": QUESTION + ANSWER}
STEPS_OF_A_PROOF = {"prompt": WORDS, "completions": [WORDS] * 2, "labels": [True, False]}
LORA = "--use_peft --lora_r 32 --lora_alpha 16"
REWARD = "--reward_funcs think_format_reward"


class Example(NamedTuple):
    """A script, the flags that its documentation states, and a row of data of its format."""

    script: str
    flags: str
    row: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.script + ", LoRA" * ("--use_peft" in self.flags)


EXAMPLES = (
    Example("trl/scripts/sft.py", "--packing --per_device_train_batch_size 2 --gradient_accumulation_steps 8", ROW),
    Example("trl/scripts/sft.py", f"--per_device_train_batch_size 2 --gradient_accumulation_steps 8 {LORA}", ROW),
    Example("trl/scripts/dpo.py", "--per_device_train_batch_size 2 --gradient_accumulation_steps 8", PREFERENCE),
    Example(
        "trl/scripts/dpo.py", f"--per_device_train_batch_size 2 --gradient_accumulation_steps 8 {LORA}", PREFERENCE
    ),
    Example("trl/scripts/reward.py", "--per_device_train_batch_size 8 --max_length 2048", PAIR),
    Example("trl/scripts/kto.py", "--per_device_train_batch_size 16", LABELLED),
    Example("trl/scripts/grpo.py", f"--per_device_train_batch_size 8 {REWARD}", PROMPT),
    Example("trl/scripts/rloo.py", f"--per_device_train_batch_size 8 {REWARD}", PROMPT),
    Example("trl/scripts/distillation.py", "--per_device_train_batch_size 8", PROMPT),
    Example("examples/scripts/reward_modeling.py", "--per_device_train_batch_size 8 --max_length 2048", PAIR),
    Example("examples/scripts/cpo.py", "--per_device_train_batch_size 4", PREFERENCE),
    Example("examples/scripts/orpo.py", "--per_device_train_batch_size 4", PREFERENCE),
    Example("examples/scripts/prm.py", "--per_device_train_batch_size 8", STEPS_OF_A_PROOF),
    Example("examples/scripts/gkd.py", "--per_device_train_batch_size 4 --gradient_accumulation_steps 8", ROW),
)


def cpu_s() -> float:
    """Return the CPU seconds of all rehearsals that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def stored(name: str) -> list[dict[str, Any]]:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []


def rehearsed(example: Example, folder: Path) -> dict[str, Any]:
    """Rehearse a script with a model and data of its own, and return a row of the table."""
    import trl

    root = Path(trl.__file__).parents[1] if example.script.startswith("trl/") else Path(sys.argv[1])
    save_tokenizer("model")
    qwen2_half_billion(architectures=["Qwen2ForCausalLM"], pad_token_id=1, eos_token_id=2).save_pretrained("model")
    Path("data").mkdir(exist_ok=True)
    for split in "train", "test":
        Path("data", f"{split}.jsonl").write_text(f"{json.dumps(example.row)}\n" * 512, encoding="utf-8")
    flags = f"--model_name_or_path model --dataset_name data --output_dir out --report_to none {example.flags}"
    if "distillation" in example.script or "gkd" in example.script:
        flags += " --teacher_model_name_or_path model"
    begin_s = cpu_s()
    found = rehearse([str(root / example.script), *flags.split()], GPU, steps=2, quiet=True)
    time = found.recorded_time() if found.fits else None
    return {
        "script": example.name, "flags": example.flags, "gpu": GPU, "fits": found.answer, **found.run_peaks,
        "verdict": found.verdict().replace(f"{root}/", "").replace(str(folder), "FOLDER"),
        "seconds": time.seconds if time else None, "cpu_s": cpu_s() - begin_s,
    }  # fmt: skip


def main(examples: Sequence[Example] = EXAMPLES) -> None:
    rows = {row["script"]: row for row in stored(NAME)}
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for example in (each for each in examples if not rows.get(each.name, {}).get("fits")):
        with tempfile.TemporaryDirectory() as folder:
            before = Path.cwd()
            os.chdir(folder)
            row = rehearsed(example, Path(folder))
            os.chdir(before)
        rows[example.name] = row
        print(f"{example.name}: {row['verdict']} ({row['cpu_s']:.0f} CPU s)", flush=True)
        save(NAME, list(rows.values()), NOTE)


if __name__ == "__main__":
    main()
