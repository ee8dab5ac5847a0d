"""PPO with too little memory to generate with gathered parameters: layer by layer, with the same answers."""

from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_on_ranks
from tests.recipes.interrupted_runs import train_until
from tests.recipes.ppo.rollouts import ppo_config, saved
from tests.recipes.recorders import events_of, search_results
from tests.recipes.running import load_ours
from torchtune_adaptive.checkpoints.manager import CheckpointManager
from torchtune_adaptive.engine.governor import EXHAUSTED, RECOVERY
from torchtune_adaptive.rl import iterations
from torchtune_adaptive.rl.stages import GENERATE, TRAIN_POLICY
from torchtune_adaptive.tune.metrics import Metrics

DEEP = (
    *(f"{of}.{size}" for of in ("policy_model", "demo_sizes") for size in ("num_layers=6", "embed_dim=128")),
    *("policy_model.intermediate_dim=256", "demo_sizes.intermediate_dim=256", "enable_activation_checkpointing=True"),
    *("batch_size=2", "ppo_batch_size=1", "ppo_epochs=1", "forward_batch_size=2", "gradient_accumulation_steps=1"),
    *("dataset.samples=12", "num_steps=12", "max_generated_tokens=4", "adaptive.round_to=none"),
)
"""Three iterations. Models train row by row in all cases, so that weights are bitwise equal."""
SEARCHED = "use_maximum_batch_size=True"
LATER = 2
"""The iteration before which memory becomes scarce."""
KEPT = ("save_every_n_steps=1", "resume_from_checkpoint=auto")


class Case(NamedTuple):
    """Overrides of two starts; the first is stopped in the third iteration."""

    overrides: tuple[str, ...]
    scarce: int | None = None
    """The rank without memory for gathered parameters in the first start."""
    later: bool = False
    """True if it has enough memory in the first iteration."""


CASES = {"searched": Case((*KEPT, SEARCHED), 1), "in training": Case(KEPT, 0, later=True)}


class Outcome(NamedTuple):
    """The outcome of a run."""

    answers: list[list[int]]
    """All generated answers of all ranks."""
    stays: bool
    recoveries: int
    rows: int


@contextmanager
def noting_answers(noted: list[list[int]]) -> Any:
    """While open, record all generated answers of all ranks in order."""
    gathered = iterations.gathered

    def noting(mine: Any) -> Any:
        everything = gathered(mine)
        noted.extend(each.answer.tolist() for each in everything)
        return everything

    with mock.patch.object(iterations, "gathered", noting):
        yield


def train(folder: Path, case: Case, kib: int, stop_at: int | None = None) -> Outcome:
    """Collective: train to the end, or until iteration `stop_at` would train the policy."""
    limits = [f"{kib}KiB" if rank == case.scarce and not case.later else "64MiB" for rank in range(2)]
    memory = f"adaptive.memory_limit=[{','.join(limits)}]"
    recipe = load_ours("full_ppo")(ppo_config(folder, *DEEP, memory, *case.overrides))
    recipe.setup()
    watch, save, iterate = Metrics.watch, CheckpointManager.save, recipe.iterate

    def watch_and_be_scarce_later(metrics: Metrics, meter: Any) -> None:
        def save_unlimited(*args: Any) -> None:
            # Rank 0 assembles whole models, which takes as much memory as gathered parameters; on a GPU this is host
            # memory.
            with meter.unlimited():
                save(*args)

        def iterate_in_less(prompts: Any, iteration: int) -> Any:
            if case.later and iteration == LATER and dist.get_rank() == case.scarce:
                meter.cap_bytes = kib * 1024
            return iterate(prompts, iteration)

        watch(metrics, meter)
        recipe.iterate = iterate_in_less
        patches.enter_context(mock.patch.object(CheckpointManager, "save", save_unlimited))

    answers: list[list[int]] = []
    with ExitStack() as patches, noting_answers(answers):
        patches.enter_context(mock.patch.object(Metrics, "watch", watch_and_be_scarce_later))
        train_until(recipe, recipe.stages.runners[TRAIN_POLICY], stop_at)
    stages = recipe.stages
    rows = getattr(stages.runners[GENERATE].limit, "rows", 0)
    return Outcome(answers, stages.generate.keep_gathered, stages.runners.recoveries, rows)


def peak_of_a_row(folder: Path, stage: str) -> int:
    probes = search_results(folder / "out")[stage]["probes"]
    return int(max(max(probe["peak"]["phase_bytes"].values()) for probe in probes if probe["rows"] == 1))


def run_cases(folder: Path) -> dict[str, tuple[Outcome, ...]]:
    message = {"gathered": (train(folder / "gathered", Case((SEARCHED,)), 0),)}
    generating, training = (peak_of_a_row(folder / "gathered", stage) for stage in (GENERATE, TRAIN_POLICY))
    assert training < generating, "else it is not generating that takes most"
    # prompts are shorter than the measured length, so one of them may need slightly less
    kib = (generating + training) // 2048
    for name, case in CASES.items():
        stopped = train(folder / name, case, kib, stop_at=3)
        message[name] = stopped, train(folder / name, case._replace(scarce=None), kib)
    return message


Runs = tuple[Path, dict[str, tuple[Outcome, ...]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("layers")
    message = run_on_ranks(2, run_cases, folder, timeout_s=250, in_group=False)
    assert message[0] == message[1]
    return folder, message[0]


def test_parameters_stay_gathered_if_memory_suffices(runs: Runs) -> None:
    [message] = runs[1]["gathered"]
    assert message.stays
    assert message.recoveries == 0
    assert len(message.answers) == 12
    assert len({tuple(answer) for answer in message.answers}) > 6


@pytest.mark.parametrize("case", CASES)
def test_answers_and_weights_are_those_of_gathered_parameters(case: str, runs: Runs) -> None:
    folder, message = runs
    [expected], (stopped, resumed) = message["gathered"], message[case]
    assert not stopped.stays
    assert stopped.rows == 2, "after a recovery too all rows may fit again"
    assert stopped.answers == expected.answers
    assert resumed.answers == expected.answers[8:]
    gathered, mine = saved(folder / "gathered"), saved(folder / case)
    assert all(torch.equal(gathered[name], mine[name]) for name in gathered)


def test_searched_runs_never_run_out_of_memory_and_gather_again_if_memory_suffices(runs: Runs) -> None:
    stopped, resumed = runs[1]["searched"]
    assert stopped.recoveries == resumed.recoveries == 0
    assert resumed.stays


def test_oom_in_training_is_recovered_and_a_resumed_run_gathers_again(runs: Runs) -> None:
    folder, message = runs
    stopped, resumed = message["in training"]
    recoveries, [given_up] = (events_of(folder / "in training", kind) for kind in (RECOVERY, EXHAUSTED))
    assert {event["stage"] for event in (*recoveries, given_up)} == {GENERATE}
    assert resumed.recoveries == stopped.recoveries == len(recoveries) > 0
    assert "out of memory on rank 0" in given_up["reason"]
    assert given_up["step"] == LATER
    assert resumed.stays
