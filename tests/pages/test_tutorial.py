"""The commands of docs/tutorial.md run one after the other, with a tiny model of the same kind on a CPU."""

import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from tests.forked_commands import STARTS_S, run_forked, run_in_terminal
from tests.pages.test_documents import PROGRAMS, ROOT, files_of
from tests.pages.tutorial_model import SIZES, write_tiny_model

PAGE = ROOT / "docs" / "tutorial.md"
ON_THE_GPU: dict[str, Any] = {
    "model": {"_component_": "torchtune.models.qwen2.lora_qwen2", **SIZES},
    "tokenizer": {"special_tokens_path": "models/qwen/special.json", "max_seq_len": 128},
    "lr_scheduler": {"num_warmup_steps": 1},
}
"""Changes to the page's config for the tiny model."""
HERE = {"device": "cpu", "dtype": "fp32", "adaptive": {"memory_limit": "12MiB"}, "save_every_n_steps": 4}
"""Changes for training without a GPU. The memory holds 8 samples, and a step of a rank has 16."""


def commands_of_the_page() -> list[list[str]]:
    text = re.sub(r"```.*?```", "", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL).replace("\\\n", "")
    lines = [shlex.split(line) for line in re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE) if line[0] != "{"]
    assert {words[0] for words in lines} <= {*PROGRAMS}
    return lines


def test_every_command_of_the_tutorial_runs(tmp_path: Path) -> None:
    def run(command: list[str]) -> str:
        program = sys.executable if command[0] == "python" else str(Path(sys.executable).with_name(command[0]))
        words = [str(ROOT / word) if word.startswith("examples/") else word for word in command[1:]]
        done = run_forked([program, *words], cwd=tmp_path, timeout_s=60)
        assert done.status == 0 or command[:2] == ["tune-adaptive", "status"], done.output
        return done.output

    def configure(changes: dict[str, Any]) -> None:
        config.update(
            {key: config.get(key, {}) | new if isinstance(new, dict) else new for key, new in changes.items()}
        )
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))

    install, download, make_data, rehearse, train, status, report, generate = commands_of_the_page()
    assert (install[0], download[:3]) == ("pip", ["tune", "download", "Qwen/Qwen2.5-0.5B-Instruct"])
    base = tmp_path / download[download.index("--output-dir") + 1]
    write_tiny_model(base)
    for name, text in files_of(PAGE).items():
        (tmp_path / name).write_text(text.replace("960", "320"))
    config = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    configure(ON_THE_GPU)

    run(make_data)
    assert re.search(r" h100 +2 +yes ", run(rehearse))
    assert not (tmp_path / "runs/mine").exists()

    configure(HERE)
    assert train[:2] == ["tune", "run"]
    with run_in_terminal(tmp_path, train[2:]) as started:
        started.when(lambda: "step_4 saved" in started.output, STARTS_S)
        os.killpg(started.pid, signal.SIGINT)
        started.wait(60)
    assert re.search(r"^SIGINT: .* after step \d+; .*\. To resume: ", started.output, re.MULTILINE), started.output
    assert "KeyboardInterrupt" not in started.output
    assert "<- chosen" in started.output
    assert "32 samples a step (as configured) · 10 steps an epoch" in started.output
    assert "can continue: step" in run(status)
    resumed = run(train)
    assert re.search(r"step 20: val_loss [\d.]+", resumed), resumed
    assert "finished: step 30" in run(status)
    picture = tmp_path / "runs/mine/adaptive_report.png"
    run(report)
    assert picture.exists()

    run(generate)
    name = "model.layers.0.self_attn.q_proj.weight"
    (merged,) = (tmp_path / generate[-1]).glob("model-*.safetensors")
    assert not load_file(merged)[name].equal(load_file(base / "model.safetensors")[name])
