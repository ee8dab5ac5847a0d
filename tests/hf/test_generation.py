"""TRL's GRPO and RLOO: each pass before a step runs out of memory, and results are compared with stock's."""

from __future__ import annotations

import gc
import io
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

pytest.importorskip("trl")

from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.distributed import DistributedConfig

from tests.captured_logs import captured_log
from tests.hf.trainers import (
    RANKS,
    FailingInTurn,
    difference,
    even_words,
    failing_in_forward,
    of_metrics,
    on_joining_ranks,
    texts,
    tiny_llama,
    tiny_reward_model,
    tokenizer,
    train,
    trl_options,
    use_fsdp2,
)
from tests.ranks import run_on_ranks
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import ConfigError, LimitExhaustedError
from torchtune_adaptive.hf import AdaptiveArguments, passes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/huggingface.md").read_text().partition("\n## GRPO and RLOO\n")[2].partition("\n## ")[0]
REFERENCE = "reference log-probabilities"
PASSES = ["generation", "log-probabilities", REFERENCE, "reward model 1"]
GENERATING: dict[str, Any] = {
    "num_generations": 4,
    "max_completion_length": 6,
    "beta": 0.1,
    # Greedy, so that no random number is drawn, and with a bias, so that some answers end early.
    "generation_kwargs": {"do_sample": False, "sequence_bias": [[[1], 0.3]]},
}
ERRORS = int(os.environ.get("TORCHTUNE_ADAPTIVE_ERRORS", "8"))
"""Errors in each pass of each case. If this is set, all cases run; docs/measured.md has the results."""
pytestmark = pytest.mark.timeout(900 + 100 * ERRORS)
TRAINING = "training"


class Outcome(NamedTuple):
    difference: float
    """From stock, the largest of all losses, gradient norms and weights."""
    metrics: float
    """From stock, the largest difference of metrics, such as rewards, their standard deviation and the KL."""
    injected: dict[str, int]
    """The errors in each pass on this rank."""
    recoveries: dict[str, float]


def with_different_prompts(trainer: type) -> Any:
    """Return a trainer whose greedy answers differ within a group, because each of them has another prompt."""

    class Different(trainer):  # type: ignore[misc, valid-type]
        evaluations: list[Any] = []  # noqa: RUF012
        advantages: list[Any] = []  # noqa: RUF012

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            self.evaluations.append(super().evaluate(*args, **kwargs))
            return self.evaluations[-1]

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            result = super()._generate_and_score_completions(inputs)
            self.advantages.append(result["advantages"])
            return result

        def _generate(self, prompts: list[str]) -> Any:
            return super()._generate([f"{prompt}w{7 * row % 31} " for row, prompt in enumerate(prompts)])

    return Different


class FailingPasses(FailingInTurn):
    """In each generation too, one operation of each pass runs out of memory."""

    counted, errors, generations = 2, ERRORS, 0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.generations += 1
        with self.failing(self._passes._runners, self.generations - self.counted):
            return super()._generate_and_score_completions(inputs)


def options(folder: Path, trainer: str, steps: int, **config_options: Any) -> dict[str, Any]:
    """Collective: options of a run with a reference model, a reward model and a reward function; made for each run."""
    settings = {"max_steps": steps, "gradient_accumulation_steps": 2, **GENERATING, **config_options}
    return {
        **trl_options(trainer, folder, **settings),
        "eval_dataset": texts(["prompt"]).select(range(12)),
        "reward_funcs": [tiny_reward_model(), even_words],
        "reward_processing_classes": [tokenizer(), None],
    }


def base_of(trainer: str, placement: str) -> Any:
    """Return TRL's trainer with different prompts, after setting up the process."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    import trl

    if placement == "FSDP2":
        use_fsdp2()
    return with_different_prompts(getattr(trl, trainer))


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def outcome(trainer: str, placement: str, extra: str, folder: Path, **config_options: Any) -> Outcome:
    """Collective: train with stock, then while each pass runs out of memory in each generation. With `extra`, train
    LoRA, or stop in the middle and resume. All ranks get the same folder."""
    base, steps = (
        base_of(trainer, placement),
        (ERRORS + FailingPasses.counted) * config_options.get("num_iterations", 1),
    )
    failing, resumes = type("Failing", (FailingPasses, base), {}), extra == "resumed"
    if resumes:
        steps *= 2
        config_options |= {"save_strategy": "steps", "save_steps": steps // 2}

    def run(name: str, *args: Any, **kwargs: Any) -> Any:
        given = {**options(folder, trainer, steps, lora=extra == "LoRA", **config_options), "base": base}
        given["arguments"].output_dir = str(folder / name)
        if placement == "DistributedConfig":
            sharded = DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))
            given["model"] = AutoModelForCausalLM.from_pretrained(given["model"], distributed_config=sharded)
        return train(folder, *args, **{**given, **kwargs})

    stock, adaptive = run("stock"), AdaptiveArguments(regrow_after=0)
    gc.freeze()  # each recovery collects garbage, which would look at all imported modules
    if resumes:
        run("adaptive", adaptive, base=failing, callbacks=[StopAt(steps // 2)])
    ours = run("adaptive", adaptive, base=failing, resume=resumes or None)
    injected: Counter[str] = sum((each.injected for each in FailingPasses.kept), Counter())
    recoveries = {name: ours.column(f"oom_recoveries/{name}")[-1] for name in injected if name != TRAINING}
    recoveries[TRAINING] = ours.column("oom_recoveries")[-1]
    return Outcome(difference(ours, stock, least=1.0), of_metrics(ours.log, stock.log), dict(injected), recoveries)


GRPO: dict[str, Any] = {"num_iterations": 2, "loss_type": "grpo"}
CASES: list[tuple[str, int, str, str, dict[str, Any]]] = [
    ("RLOOTrainer", 1, "one process", "", {}),
    ("GRPOTrainer", 2, "DDP", "resumed", GRPO),
    ("RLOOTrainer", 2, "FSDP2", "", {}),
    ("GRPOTrainer", 2, "DistributedConfig", "", GRPO),
]
if "TORCHTUNE_ADAPTIVE_ERRORS" in os.environ:
    CASES += [
        ("GRPOTrainer", 1, "one process", "", GRPO),
        ("RLOOTrainer", 2, "DDP", "", {}),
        *(("GRPOTrainer", ranks, placement, "", GRPO) for ranks in (2, 3) for placement in ("DDP", "FSDP2")),
        *(("GRPOTrainer", 2, placement, "LoRA", GRPO) for placement in ("DDP", "FSDP2")),
        ("GRPOTrainer", 2, "FSDP2", "resumed", GRPO),
    ]


@pytest.mark.parametrize(
    ("trainer", "ranks", "placement", "extra", "config_options"), CASES, ids=["-".join(map(str, c[:4])) for c in CASES]
)
def test_each_pass_recovers_and_trains_like_stock(
    trainer: str, ranks: int, placement: str, extra: str, config_options: dict[str, Any], tmp_path: Path
) -> None:
    function, timeout_s = partial(outcome, **config_options), 60 + 20 * ERRORS
    outcomes = run_on_ranks(ranks, function, trainer, placement, extra, tmp_path, in_group=False, timeout_s=timeout_s)
    print(outcomes)
    expected = ERRORS * (1 + (extra == "resumed"))
    for name in [TRAINING, *PASSES]:
        if (extra, name) == ("LoRA", REFERENCE):  # the policy without its adapter, which is the same stage
            continue
        injected = sum(each.injected.get(name, 0) for each in outcomes)
        assert 3 * expected / 4 <= injected <= expected, "a generation may end before the operation that should fail"
        assert {each.recoveries[name] for each in outcomes} == {injected}
    assert max(each.difference for each in outcomes) < 1e-5, outcomes
    assert max(each.metrics for each in outcomes) < 1e-4, outcomes


def changed(
    way: str, trainer: str, placement: str, **config_options: Any
) -> tuple[float, float, dict[str, float], str]:
    """Collective: compare three steps with stock; return the differences of losses and weights, and of metrics and
    advantages, the last log entry, and what rank 0 printed."""
    base = base_of(trainer, placement)
    adaptive, kind = {
        "healthy": (AdaptiveArguments(), base),
        "searched": (AdaptiveArguments(use_maximum_batch_size=True, memory_limit="32MiB"), base),
        "failed in the first generation": (AdaptiveArguments(), failing_in_forward(base, 3)),
        "failed in the first scores": (AdaptiveArguments(), failing_in_forward(base, 7)),
        "failed in an evaluation": (AdaptiveArguments(), failing_in_forward(base, 3, evaluating=True)),
    }[way]
    with tempfile.TemporaryDirectory() as name:
        folder, printed = Path(name), io.StringIO()
        stock = train(folder, **{**options(folder, trainer, 3, **config_options), "base": base})
        with redirect_stdout(printed):
            ours = train(folder, adaptive, **{**options(folder, trainer, 3, **config_options), "base": kind})
    metrics = of_metrics(ours.log[:1], stock.log[:1])
    half = len(base.advantages) // 2
    for expected, found in zip(base.advantages[:half], base.advantages[half:], strict=True):
        metrics = max(metrics, (found - expected).abs().max().item())
    half = len(base.evaluations) // 2
    for expected, evaluated in zip(base.evaluations[:half], base.evaluations[half:], strict=True):
        metrics = max(metrics, *(abs(evaluated[name] - expected[name]) for name in ("eval_loss", "eval_reward")))
    return difference(ours, stock, least=1.0), metrics, ours.log[-1], printed.getvalue()


@pytest.mark.parametrize(("trainer", "placement"), [("GRPOTrainer", "DDP"), ("RLOOTrainer", "FSDP2")])
def test_search_measures_each_pass_at_the_longest_prompt_and_answer(trainer: str, placement: str) -> None:
    function = partial(changed, num_iterations=2)  # with one iteration, GRPO needs no earlier log-probabilities
    (differs, metrics, log, printed), *_ = run_on_ranks(
        RANKS[placement], function, "searched", trainer, placement, in_group=False, timeout_s=150
    )
    longest = max(len(each["prompt"].split()) + 1 for each in texts(["prompt"]))  # `with_different_prompts` adds a word
    longest += GENERATING["max_completion_length"]
    tables = [line for line in printed.splitlines() if line.startswith("batch search")]
    assert [re.match("batch search(?: · (.*))? · linear", line)[1] for line in tables] == [None, *PASSES]  # type: ignore[index]
    assert all(f" · {longest} tokens · " in line for line in tables), tables
    peaks = [re.findall(r"^  2 +([\d.]+) MiB", table, re.MULTILINE) for table in printed.split("batch search")]
    [policy], [reference] = peaks[3:5]
    assert float(policy) <= float(reference), "the policy runs without gradients, as the reference model does"
    assert log["microbatch_rows"] in (4, 8)
    assert max(differs, metrics) < 1e-5


run_stage = StepRunner.run


def run_without_room(runner: StepRunner[Any], *args: Any, **kwargs: Any) -> Any:
    if runner.stage == passes.GENERATION:
        raise LimitExhaustedError("no room for one row")
    return run_stage(runner, *args, **kwargs)


@pytest.mark.parametrize("what", ["parameters", "one row"])
@on_joining_ranks(2, timeout_s=100)
def test_generation_gathers_for_each_token_if_it_does_not_fit_otherwise(what: str) -> None:
    """Rank 1 has no room to gather all parameters at once, or no rank then has room for a row. The search comes after
    this has been found out."""
    base, limited = (
        base_of("RLOOTrainer", "FSDP2"),
        AdaptiveArguments(use_maximum_batch_size=True, memory_limit="64MiB"),
    )
    sizes = [2**50 if what == "parameters" and os.environ["RANK"] == "1" else 1]
    with tempfile.TemporaryDirectory() as name, captured_log("torchtune_adaptive") as lines, ExitStack() as stack:
        folder = Path(name)
        stock = train(folder, **{**options(folder, "RLOOTrainer", 3), "base": base})
        stack.enter_context(mock.patch.object(passes, "gathered_bytes", return_value=sizes))
        if what == "one row":
            stack.enter_context(mock.patch.object(StepRunner, "run", run_without_room))
        ours = train(folder, limited, **{**options(folder, "RLOOTrainer", 3), "base": base})
    assert difference(ours, stock, least=1.0) < 1e-5
    assert "oom_recoveries/log-probabilities" in ours.log[-1]
    assert "oom_recoveries/generation" not in ours.log[-1]
    assert sum("each token gathers" in line for line in lines) == (os.environ["RANK"] == "0")


@pytest.mark.parametrize("way", ["failed in the first generation", "failed in the first scores"])
def test_first_pass_recovers_although_no_earlier_one_has_shown_its_collectives(way: str) -> None:
    for differs, _, log, _ in run_on_ranks(2, changed, way, "RLOOTrainer", "FSDP2", in_group=False, timeout_s=100):
        assert differs < 1e-5
        failed = {name for name in PASSES if log[f"oom_recoveries/{name}"]}
        assert failed == {"generation" if "generation" in way else "log-probabilities"}


@pytest.mark.parametrize("placement", ["DDP", "FSDP2"])
def test_generation_in_an_evaluation_recovers(placement: str) -> None:
    function = partial(changed, eval_strategy="steps", eval_steps=2)
    way, trainer = "failed in an evaluation", "GRPOTrainer"
    for differs, metrics, log, _ in run_on_ranks(2, function, way, trainer, placement, in_group=False, timeout_s=100):
        assert max(differs, metrics) < 1e-5
        assert log["oom_recoveries/generation in evaluation"] == 1


@on_joining_ranks(2, timeout_s=100)
def test_reward_function_may_generate_on_one_rank_and_a_loss_over_all_rows_is_refused() -> None:
    def sample(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        if os.environ["RANK"] == "0":
            policies[-1].generate(torch.tensor([[3, 4]]), max_new_tokens=2, do_sample=False)
        return [float(len(each)) for each in completions]

    class Kept(base_of("GRPOTrainer", "DDP")):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            policies.append(self.model)

    policies: list[Any] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(adaptive: AdaptiveArguments | None, **config_options: Any) -> Any:
            given = options(folder, "GRPOTrainer", 2, **config_options)
            given |= {"reward_funcs": [sample], "reward_processing_classes": [None], "base": Kept}
            return train(folder, adaptive, **given)

        assert difference(run(AdaptiveArguments()), run(None), least=1.0) < 1e-6
        with pytest.raises(ConfigError, match="top_entropy_quantile=1"):
            run(AdaptiveArguments(), top_entropy_quantile=0.5)


@on_joining_ranks(1, timeout_s=100)
def test_sampled_answers_are_those_of_stock_unless_generation_itself_is_repeated() -> None:
    found = []
    for way in "healthy", "failed in the first scores", "failed in the first generation":
        differs, _, log, _ = changed(way, "GRPOTrainer", "one process", generation_kwargs={}, num_iterations=2)
        found.append((differs, {name for name in PASSES if log.get(f"oom_recoveries/{name}")}))
    (healthy, none), (scores, in_scores), (generation, in_generation) = found
    assert (none, in_scores, in_generation) == (set(), {"log-probabilities"}, {"generation"})
    assert healthy == 0.0
    assert scores < 1e-5
    assert generation > 1e-3


def test_example_of_the_page_recovers_in_each_pass() -> None:
    command = PAGE.partition("$ torchrun ")[2].splitlines()[0].split()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command]
    output = subprocess.check_output(command, cwd=ROOT, stderr=subprocess.STDOUT, text=True, timeout=300)
    line = re.compile(r"^ *step 1((?:, [\w -]+)?): out of memory", re.MULTILINE)
    assert [*dict.fromkeys(line.findall(output))] == [*dict.fromkeys(line.findall(PAGE))]
    assert len({*line.findall(output)}) == 1 + len(PASSES)


@on_joining_ranks(1)
def test_script_of_the_page_trains(tmp_path: Path) -> None:
    """For one step, with a tiny model."""
    import datasets

    tiny_llama().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    script = PAGE.partition("```python\n")[2].partition("```")[0]
    changed = {
        "Qwen/Qwen2.5-1.5B-Instruct": str(tmp_path),
        'GRPOConfig(\n        "out"': f'GRPOConfig(\n        "{tmp_path}", max_steps=1, use_cpu=True, logging_steps=1',
        "max_completion_length=256": "max_completion_length=6",
        "use_maximum_batch_size=True": 'use_maximum_batch_size=True, memory_limit="256MiB"',
    }
    for before, after in changed.items():
        assert before in script
        script = script.replace(before, after)
    names: dict[str, Any] = {}
    with mock.patch.object(datasets, "load_dataset", return_value=texts(["prompt"])):
        exec(script, names)
    assert names["trainer"].state.log_history[0]["microbatch_rows"] == 64
