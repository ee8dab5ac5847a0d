"""`adaptive.measure_noise` as a user sees it, also resumed."""

import math
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest

from tests.captured_logs import captured_log
from tests.ranks import run_on_ranks
from tests.recipes.interrupted_runs import stopped_before_epoch
from tests.recipes.recorders import read_log
from tests.recipes.running import demo_config, run_ours

NOISY = (
    "adaptive.measure_noise=2",
    "lr_scheduler=null",
    "batch_size=1",
    "gradient_accumulation_steps=2",
    "clip_grad_norm=1.0",
)
SCALE = "gradient_noise_scale"


def whole_and_resumed(kind: str, folder: Path, options: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Collective: run once whole and once stopped after the first epoch; return the log lines of the first and the
    last run.
    """
    with captured_log() as of_whole:
        run_ours(kind, demo_config(kind, folder / "whole", *options))
    with stopped_before_epoch(1):
        run_ours(kind, demo_config(kind, folder / "resumed", *options))
    with captured_log() as of_resumed:
        run_ours(kind, demo_config(kind, folder / "resumed", *options, "resume_from_checkpoint=auto"))
    return of_whole, of_resumed


def check_measured(folder: Path, lines: list[str], samples: int, measured: list[int]) -> None:
    """Check that both runs measured in these steps with equal results, and that the resumed run logs its verdict."""
    whole, resumed = (read_log(folder / name / "log.jsonl") for name in ("whole", "resumed"))
    assert [step["step"] for step in whole if SCALE in step] == measured
    assert [step.get(SCALE) for step in resumed] == [step.get(SCALE) for step in whole]
    last = whole[-1]
    assert last[f"{SCALE}_low"] < last[SCALE] < last.get(f"{SCALE}_high", math.inf)
    (verdict,) = [line for line in lines if line.startswith("gradient noise · the noise scale is ")]
    assert f"and a step has {samples}:" in verdict


FOLLOWING = (
    "adaptive.measure_noise=1",
    "batch_increase_function._component_=torchtune_adaptive.tune.schedule.follow_noise",
    "batch_increase_function.fraction=1000",
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=4",
    "adaptive.max_batch_size=64",
    "adaptive.lr_scaling=sqrt",
    "epochs=3",
)


def test_batch_that_follows_the_noise_grows_and_resumes_equally(tmp_path: Path) -> None:
    options = (*NOISY, *FOLLOWING)
    (lines, last), _ = run_on_ranks(2, whole_and_resumed, "full", tmp_path, options, timeout_s=90, in_group=False)
    check_measured(tmp_path, last, 16, [*range(10, 29)])
    assert [line for line in lines if "samples a step (before" in line] == [
        "epoch 1: 8 samples a step (before: 4), learning rate × 1.41",
        "epoch 2: 16 samples a step (before: 8), learning rate × 2",
    ]
    whole, resumed = (read_log(tmp_path / name / "log.jsonl") for name in ("whole", "resumed"))
    assert len(whole) == 16 + 8 + 4
    assert [(step["lr"], step["loss"]) for step in resumed] == [(step["lr"], step["loss"]) for step in whole]
    # the rate depends on samples: after the fourth step of doubled size, 24 of 48 configured steps have passed
    rates = [step["lr"] for step in whole]
    assert rates[19] == pytest.approx(0.003 * 2**0.5 * (1 + math.cos(math.pi * (24 - 4) / (48 - 4))) / 2, rel=1e-6)
    assert rates[-1] == pytest.approx(0, abs=1e-9)


def followed(folder: Path, options: tuple[str, ...], stop_before: int | None) -> None:
    """Collective: train epochs with a sample-based learning rate, up to `stop_before`."""
    config = demo_config("full", folder, *NOISY, *FOLLOWING, "adaptive.lr_scaling=none", *options)
    with nullcontext() if stop_before is None else stopped_before_epoch(stop_before):
        run_ours("full", config)


@pytest.mark.parametrize(
    ("ranks", "option"), [(2, "batch_increase_function.fraction=0.0001"), (1, "max_steps_per_epoch=12")]
)
def test_sample_based_learning_rate_ends_at_its_minimum(tmp_path: Path, ranks: int, option: str) -> None:
    """Resumed on other ranks, or with epochs shorter than the dataset."""
    again = (option, "resume_from_checkpoint=auto", "overwrite_output_dir=False")
    run_on_ranks(1, followed, tmp_path / "run", again, 1, timeout_s=60, in_group=False)
    run_on_ranks(ranks, followed, tmp_path / "run", again, None, timeout_s=60, in_group=False)
    rates = [step["lr"] for step in read_log(tmp_path / "run" / "log.jsonl")]
    assert max(after / before for before, after in pairwise(rates[3:])) < 1.02
    assert rates[-1] == pytest.approx(0, abs=1e-9)


def test_preference_training_measures_noise_and_resumes_measuring(tmp_path: Path) -> None:
    options = (*NOISY, "epochs=2", "dataset.samples=44", "tokenizer.max_seq_len=96")
    (_, last), _ = run_on_ranks(2, whole_and_resumed, "lora_dpo", tmp_path, options, timeout_s=90, in_group=False)
    check_measured(tmp_path, last, 4, [20, 22])  # 11 of 22 steps are measured, and 10 are needed
