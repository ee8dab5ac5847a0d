"""The blocks of docs/tutorial.md run one after the other, with a tiny model of the same kind on a CPU."""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import yaml

from tests.pages.tutorial_model import SIZES, write_tiny_model
from tests.recipes.running import environment

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def blocks() -> tuple[dict[str, str], list[list[str]]]:
    """Return the files of the page by name, and its commands."""
    text = PAGE.read_text(encoding="utf-8")
    files = {name: f"# {name}\n{body}" for name, body in re.findall(r"```\w+\n# (\S+)\n(.*?)```", text, re.DOTALL)}
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = re.sub(r" *\\\n *", " ", "".join(re.findall(r"^ {4}\S.*\n(?: {6}.*\n)*", text, re.MULTILINE))).splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if not line.strip().startswith("{")]
    return files, [command for command in commands if command[0] != "pip" and command[:2] != ["tune", "download"]]


def test_every_block_of_the_tutorial_runs(tmp_path: Path) -> None:
    files, commands = blocks()
    assert {*files} == {"make_data.py", "mine.yaml", "generate.py"}
    write_tiny_model(tmp_path / "models" / "qwen")
    for name, text in files.items():
        (tmp_path / name).write_text(text.replace("960", "96"))
    config = yaml.safe_load(files["mine.yaml"])
    config["model"] |= {"_component_": "torchtune.models.qwen2.lora_qwen2", **SIZES}
    config["model"] |= {"max_seq_len": 1024, "tie_word_embeddings": True}
    config["tokenizer"] |= {"special_tokens_path": "models/qwen/special.json", "max_seq_len": 128}
    config |= {"save_every_n_steps": 4, "run_val_every_n_steps": 4}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    makes_data, rehearses, trains, status, *later = commands

    def run(command: list[str], stopped_after: str = "") -> str:
        """Run a command to its end, or send it SIGINT after it has printed `stopped_after`."""
        program = Path(sys.executable).with_name(command[0])
        with subprocess.Popen(
            [program, *command[1:]],
            cwd=tmp_path,
            env=environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            lines = []
            try:
                for line in process.stdout:
                    lines.append(line)
                    if stopped_after and stopped_after in line:
                        os.killpg(process.pid, signal.SIGINT)
                        stopped_after = ""
            except BaseException:  # pytest's timeout
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        return "".join(lines) + f"exit status {process.returncode}"

    assert run(makes_data).endswith("exit status 0")
    table = run(rehearses)
    assert re.search(r" h100 +2 +yes ", table), table

    config |= {"device": "cpu", "dtype": "fp32", "adaptive": {"memory_limit": "256MiB"}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    stopped = run(trains, stopped_after="step_4 saved")
    assert "chosen" in stopped
    assert "can continue" in run(status)
    resumed = run(trains)
    assert "val_loss" in resumed, resumed
    assert (tmp_path / "runs/mine/adaptive_report.png").exists()
    generates = later.pop()
    assert generates[:2] == ["python", "generate.py"]
    assert "finished: step 9" in run(status)
    assert run(generates).endswith("exit status 0")
