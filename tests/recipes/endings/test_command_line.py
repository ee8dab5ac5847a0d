"""`tune run` from a directory without files of this project."""

import re
import shutil
from pathlib import Path

import pytest

from tests.forked_commands import tune_run_forked
from tests.recipes.running import STOCK, Finished, tune_run

ROOT = Path(__file__).parents[3]
FULL, LORA = "adaptive_full_finetune_distributed", "adaptive_lora_finetune_distributed"
SMALL = ("dataset.samples=32", "epochs=1", "output_dir=out", "use_maximum_batch_size=False", "adaptive=null")
STOCK_ON_A_LAPTOP = (
    "tokenizer=torchtune_adaptive.demo.tokenizer.DemoTokenizer",
    "~tokenizer.path",
    "tokenizer.max_seq_len=256",
    "model=torchtune_adaptive.demo.model.demo_model",
    "checkpointer=torchtune_adaptive.demo.weights.demo_checkpointer",
    "checkpointer.checkpoint_dir=weights",
    "checkpointer.checkpoint_files=[demo.pt]",
    "dataset=torchtune_adaptive.demo.dataset.demo_dataset",
    "device=cpu",
    "dtype=fp32",
    "batch_size=2",
    "gradient_accumulation_steps=2",
)
OUR_LINE = r"^\d+ rows × \d+ microbatches × \d+ ranks? = \d+ samples a step .*$"
TORCHAOS_NOTICE = "Skipping import of cpp extensions"
"""`tune` itself prints it, before any code of ours runs."""
NOISE = re.compile(
    r"warning|deprecat|cpp extensions|set_vital|pin_memory|destroy_process_group|NCCL|OMP_NUM_THREADS", re.IGNORECASE
)


def assert_trained(ended: Finished, cwd: Path, *, arithmetic: str) -> None:
    """Check that the run succeeded, printed its arithmetic once, and printed no line that looks like a problem."""
    assert ended.status == 0, ended.output
    assert re.findall(OUR_LINE, ended.output, re.MULTILINE) == [arithmetic], ended.output
    assert "_component_" not in ended.output, "a screen of config"
    assert "\r" not in ended.output, "a progress bar, and lines that hang on it"
    noise = [line for line in ended.output.splitlines() if NOISE.search(line)]
    assert not noise or (len(noise) == 1 and noise[0].startswith(TORCHAOS_NOTICE)), noise
    assert list((cwd / "out" / "epoch_0").glob("model-*.bin"))


@pytest.mark.smoke
def test_command_prints_the_lines_that_readme_shows(tmp_path: Path) -> None:
    """Losses are compared to one digit, because later ones differ between CPUs.

    Any step on any rank can be the first to run out of memory: step 4 peaks 0.3 MiB below the limit, and gloo may hold
    a gathered layer a moment longer.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [(command, block)] = re.findall(r"^    \$ tune run (.+)\n((?:    .+\n)+)", text, re.MULTILINE)
    launcher, number, recipe, *config = command.split()
    assert (launcher, number) == ("--nproc_per_node", "2")
    ended = tune_run_forked(recipe, *config, ranks=2, cwd=tmp_path, timeout_s=180)
    assert ended.status == 0
    seen = [_comparable(line) for line in ended.output.splitlines()]
    shown = [_comparable(line.strip()) for line in block.splitlines()]
    assert len(shown) == 3
    assert {*shown} <= {each.strip() for each in seen}


def _comparable(line: str) -> str:
    if "out of memory" in line:
        return re.sub(r"\d+", "N", line)
    return re.sub(r"\b(\d+\.\d)\d{3}\b", r"\1", line)


def test_one_process_with_a_custom_config_and_custom_components(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from torchtune_adaptive.demo.dataset import demo_dataset as my_dataset\n")
    shutil.copy(STOCK / "configs" / "llama3_2" / "1B_lora.yaml", tmp_path / "mine.yaml")
    config = ("--config", "mine.yaml", *STOCK_ON_A_LAPTOP, *SMALL)
    overrides = ("model=torchtune_adaptive.demo.model.lora_demo_model", "dataset=mine.my_dataset")
    ended = tune_run(LORA, *config, *overrides, ranks=None, cwd=tmp_path, timeout_s=120)
    assert_trained(
        ended,
        tmp_path,
        arithmetic="2 rows × 2 microbatches × 1 rank = 4 samples a step (as configured) · 8 steps an epoch · 1 epoch",
    )
    assert (tmp_path / "out" / "epoch_0" / "adapter_model.pt").is_file()
