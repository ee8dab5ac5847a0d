"""Other frameworks, started like their users start them, as docs/frameworks.md shows. Needs the real packages:
`make test-frameworks` installs each of them into an environment of its own.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)
BIN = Path(sys.executable).parent
PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
STEPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and a tokenizer of words, as downloaded from a hub."""
    from tests.hf.trainers import tiny_llama, tokenizer

    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Instructions and answers, in alpaca's format. Every step has long and short samples."""
    drawn = random.Random(3)

    def words() -> str:
        return " ".join(f"w{drawn.randrange(250)}" for _ in range(drawn.randint(3, 25)))

    path = tmp_path / "samples.json"
    path.write_text(json.dumps([{"instruction": words(), "input": "", "output": words()} for _ in range(120)]))
    return path


def needs(package: str) -> None:
    try:
        version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed: make test-frameworks")


def run(folder: Path, *command: str | Path) -> str:
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [str(each) for each in command],
        cwd=folder,
        env={**os.environ, **environment, "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout + done.stderr


def logged(output: Path, name: str) -> list[float]:
    """The values that Trainer has logged under this name, one per step."""
    states = sorted(output.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    history = json.loads(states[-1].read_text())["log_history"]
    return [entry[name] for entry in history if name in entry]


def check(folder: Path) -> None:
    """Compare the losses of the two runs, of which ours has run out of memory."""
    stock, ours = (logged(folder / name, "loss") for name in ("stock", "ours"))
    assert len(stock) == len(ours) == STEPS
    assert max(abs(one / other - 1) for one, other in zip(ours, stock, strict=True)) < 1e-4, (ours, stock)
    assert logged(folder / "ours", "oom_recoveries")[-1] >= 1


def test_axolotl(tmp_path: Path, model: Path, samples: Path) -> None:
    needs("axolotl")
    config = f"""
base_model: {model}
datasets:
  - path: {samples}
    ds_type: json
    type: alpaca
sequence_len: 128
micro_batch_size: 8
gradient_accumulation_steps: 1
max_steps: {STEPS}
logging_steps: 1
learning_rate: 0.001
optimizer: adamw_torch
lr_scheduler: constant
bf16: false
"""
    plugin = """
plugins: [axolotl_plugin.AdaptivePlugin]
adaptive:
  memory_limit: 5MiB
"""
    shutil.copy("examples/axolotl_plugin.py", tmp_path)
    for name, text in {"stock": config, "ours": config + plugin}.items():
        (tmp_path / f"{name}.yaml").write_text(text + f"output_dir: {tmp_path / name}\n")
        run(tmp_path, "env", "PYTHONPATH=.", "axolotl", "train", f"{name}.yaml")
    check(tmp_path)


def test_the_plugin_checks_its_section_and_extends_the_trainer_of_another_plugin() -> None:
    needs("axolotl")
    from axolotl.core.trainers import AxolotlTrainer
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.diffusion import DiffusionPlugin
    from axolotl.integrations.diffusion.trainer import DiffusionTrainer
    from axolotl.utils.dict import DictDefault

    from examples.axolotl_plugin import AdaptivePlugin

    manager, plugin = PluginManager.get_instance(), AdaptivePlugin()
    manager.plugins |= {"ours": plugin, "other": DiffusionPlugin()}
    with pytest.raises(TypeError, match="memory_limt"):
        plugin.register({"adaptive": {"memory_limt": "5MiB"}})
    plugin.register({"adaptive": None})  # a section whose lines are commented out
    assert issubclass(manager.get_trainer_cls(DictDefault(adaptive=None)), DiffusionTrainer)
    with pytest.raises(ValueError, match="remove rl or the plugin"):
        plugin.register({"rl": "dpo"})
    with pytest.raises(ValueError, match=r"AxolotlTrainer .* list AdaptivePlugin first"):
        plugin.post_trainer_create(DictDefault(), object.__new__(AxolotlTrainer))


def test_llamafactory(tmp_path: Path, model: Path, samples: Path) -> None:
    needs("llamafactory")
    (tmp_path / "dataset_info.json").write_text(json.dumps({"samples": {"file_name": samples.name}}))
    config = {
        "model_name_or_path": str(model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "samples",
        "dataset_dir": str(tmp_path),
        "template": "default",
        "cutoff_len": 128,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 0.001,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "use_cpu": True,
    }
    # the file that the page tells users to save, with another argument of `adaptive`
    script = PAGE.read_text().split("**LLaMA-Factory ")[1].split("```python\n")[1].split("```")[0]
    assert script.count("use_maximum_batch_size=True") == 1
    (tmp_path / "train.py").write_text(script.replace("use_maximum_batch_size=True", "memory_limit='4MiB'"))
    for name, command in {"stock": ["llamafactory-cli", "train"], "ours": [sys.executable, "train.py"]}.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps({**config, "output_dir": str(tmp_path / name)}))
        run(tmp_path, *command, f"{name}.yaml")
    check(tmp_path)


@pytest.mark.parametrize(("package", "example"), [("ray", "ray_train.py"), ("lightning", "lightning_fsdp2.py")])
def test_example_with_a_step_runner_recovers_and_learns(package: str, example: str, tmp_path: Path) -> None:
    needs(package)
    shutil.copy(PAGE.parents[1] / "examples" / example, tmp_path)
    output = run(tmp_path, sys.executable, example)
    assert re.search(r"step 1: out of memory on rank 1 .*microbatch 16 -> 8 rows, step repeated", output)
    losses = dict(re.findall(r"step (\d): loss (\d+\.\d+)", output))  # Ray may print a line twice
    assert len(losses) >= 8
    assert float(losses["8"]) < float(losses["1"])
