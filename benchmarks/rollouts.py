"""Compare PPO with a limit for each stage to the same with one limit, the smallest, for all stages.

    python -m benchmarks --only rollouts

In one run on two ranks, two kinds of iterations alternate: with the limits that the searches have found, and with the
smallest of these in every stage. The smallest limit is the result of a search of the policy alone, or, if the critic is
larger, of the critic. The learning rate is 0, so both kinds generate the same tokens for the same prompts and train on
the same advantages. Goal: an iteration of PPO 1.3 times as fast. Timed iterations neither limit nor count memory,
because this would slow both down.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset

from benchmarks.results import Result, compared
from tests.ranks import run_on_ranks
from tests.recipes.ppo.rollouts import ppo_config
from tests.recipes.running import load_ours
from torchtune_adaptive.demo.model import demo_classifier, demo_model
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.rl.stages import FORWARD, GENERATE, SCORE_REFERENCE, TRAIN_POLICY, TRAIN_VALUE

RANKS = 2
ANSWERS = 32
"""Answers of one rank in an iteration."""
TRAINED = 16
"""Answers of one rank in an update of PPO."""
HALVES = {"generating": (GENERATE,), "forward": FORWARD, "training": (TRAIN_VALUE, TRAIN_POLICY)}


@dataclass(frozen=True)
class Shape:
    """Model sizes and memory limit."""

    name: str
    width: int
    prompt: int
    answer: int
    memory_mib: float
    critic_layers: int = 2

    @property
    def sizes(self) -> dict[str, int]:
        return {"num_layers": 2, "embed_dim": self.width, "intermediate_dim": 2 * self.width}

    @property
    def config(self) -> tuple[str, ...]:
        plain = "torchtune.training.FullModelTorchTuneCheckpointer"
        models = {"policy_model": self.sizes, "reward_and_value_model": self.critic_sizes}
        files = {"checkpointer": "policy", "ref_policy_checkpointer": "policy"}
        files |= {"value_checkpointer": "critic", "reward_checkpointer": "critic"}
        return (
            *(f"batch_size={ANSWERS}", f"ppo_batch_size={TRAINED}", f"num_steps={ANSWERS * RANKS}"),
            *(f"{model}.{size}={value}" for model, sizes in models.items() for size, value in sizes.items()),
            *(f"{key}._component_={plain}" for key in files),
            *(f"{key}.checkpoint_files=[{name}.pt]" for key, name in files.items()),
            "dataset._component_=benchmarks.rollouts.random_prompts",
            f"dataset.tokens={self.prompt}",
            f"dataset.samples={ANSWERS * RANKS}",
            f"tokenizer.max_seq_len={self.prompt}",
            f"max_generated_tokens={self.answer}",
            "ppo_epochs=1",
            "optimizer.lr=0.0",
            "use_maximum_batch_size=True",
            f"adaptive.memory_limit={self.memory_mib}MiB",
        )

    @property
    def critic_sizes(self) -> dict[str, int]:
        return {**self.sizes, "num_layers": self.critic_layers}


SHAPES = (
    Shape("PPO, short answers", width=64, prompt=16, answer=12, memory_mib=3.5),
    Shape("PPO, long answers", width=64, prompt=16, answer=64, memory_mib=8),
    Shape("PPO, long prompts", width=64, prompt=128, answer=16, memory_mib=12),
    Shape("PPO, wide model", width=256, prompt=16, answer=32, memory_mib=32),
    Shape("PPO, larger critic", width=64, prompt=16, answer=32, memory_mib=10, critic_layers=6),
)


def run(pairs: int) -> Result:
    rows = [measure(shape, pairs) for shape in SHAPES]
    note = (
        f"rows: of a microbatch in generating, forward, train value, train policy; a rank has {ANSWERS} answers, "
        f"{TRAINED} in an update. ratio: seconds of an iteration with one limit for all stages over those with "
        "separate limits, in wall time and in CPU time of all ranks; for the halves of an iteration, in wall time"
    )
    shown = [{"figure": name, **{row["shape"]: row[name] for row in rows}} for name in rows[0] if name != "shape"]
    return Result(rows, note, shown)


def measure(shape: Shape, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights"
        weights.mkdir()
        torch.manual_seed(0)
        torch.save(demo_model(**shape.sizes).state_dict(), weights / "policy.pt")
        torch.save(demo_classifier(**shape.critic_sizes).state_dict(), weights / "critic.pt")
        timeout_s = 240 + 60 * pairs
        timed = run_on_ranks(RANKS, compare, shape, Path(folder) / "timed", pairs, timeout_s=timeout_s, in_group=False)
    return {"shape": shape.name, **timed[0]}


class RandomPrompts(Dataset[dict[str, list[int]]]):
    """Random prompts, all of one length."""

    def __init__(self, samples: int, tokens: int) -> None:
        self._samples = samples
        self._tokens = tokens

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = random.Random(index).choices(range(256), k=self._tokens)
        return {"tokens": tokens, "labels": tokens}


def random_prompts(tokenizer: Any, *, samples: int, tokens: int) -> RandomPrompts:
    """Component for a config's `dataset:`."""
    return RandomPrompts(samples, tokens)


class Cost(NamedTuple):
    """The cost of an iteration."""

    wall_s: float
    cpu_s: float
    """CPU time of all ranks."""
    halves: Mapping[str, float]
    """Seconds by half of the iteration."""


def compare(shape: Shape, folder: Path, pairs: int) -> dict[str, Any]:
    """Collective: iterations with a limit for each stage and with one, in turns, after one of each to warm up."""
    recipe = load_ours("full_ppo")(config_of(shape, folder))
    recipe.setup()
    own = {stage: runner.limit.rows for stage, runner in recipe.stages.items()}
    one = dict.fromkeys(own, min(own.values()))
    data, mine = recipe.iterations.data.dataset, recipe.run.settings.config.batch_size
    prompts = [data[index] for index in range(dist.get_rank(), mine * RANKS, RANKS)]
    rounds = [(iterate(recipe, own, prompts), iterate(recipe, one, prompts)) for _ in range(pairs + 1)][1:]
    assert recipe.stages.recoveries == 0
    recipe.cleanup()
    wall = compared([(each.wall_s, single.wall_s) for each, single in rounds])
    cpu = compared([(each.cpu_s, single.cpu_s) for each, single in rounds])
    return {
        "rows": " ".join(str(own[stage]) for stage in (GENERATE, SCORE_REFERENCE, TRAIN_VALUE, TRAIN_POLICY)),
        "one number": min(own.values()),
        "iteration s": statistics.median(each.wall_s for each, _ in rounds),
        **wall,
        **{f"{figure} by CPU time": cpu[figure] for figure in ("ratio", "lowest", "highest")},
        **{half: compared([(e.halves[half], s.halves[half]) for e, s in rounds])["ratio"] for half in HALVES},
    }


def config_of(shape: Shape, folder: Path) -> DictConfig:
    cfg = ppo_config(folder, *shape.config)
    for section in cfg.values():
        if OmegaConf.is_dict(section):
            section.pop("sizes", None)  # the sizes of the demo's weights
    return cfg


def iterate(recipe: Any, rows: Mapping[str, int], prompts: Sequence[Any]) -> Cost:
    """Collective: repeat the first iteration."""
    recipe.stages.use_limits({stage: RowLimit(count) for stage, count in rows.items()})
    dist.barrier()
    began, cpu_began = time.perf_counter(), time.process_time()
    recipe.iterate(prompts, 1)
    wall_s = time.perf_counter() - began
    everywhere: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(everywhere, time.process_time() - cpu_began)
    halves = {half: sum(recipe.iterations.seconds[stage] for stage in of) for half, of in HALVES.items()}
    return Cost(wall_s, sum(everywhere), halves)
