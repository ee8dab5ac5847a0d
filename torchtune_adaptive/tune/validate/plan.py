"""What can be asked of `adaptive_plan`: a question that it answers, about a run that would start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from omegaconf import DictConfig

from torchtune_adaptive.errors import together
from torchtune_adaptive.memory_sizes import size_for_rank
from torchtune_adaptive.tune.config.settings import Settings, on_gpu
from torchtune_adaptive.tune.parts.microbatch import obstacle_to_recovery
from torchtune_adaptive.tune.parts.process_group import mesh_shape
from torchtune_adaptive.tune.plan.question import PlanSettings
from torchtune_adaptive.tune.plan.settings import budget, check_advice, lengths
from torchtune_adaptive.tune.rl.settings import read_ppo_settings
from torchtune_adaptive.tune.trace.which_recipe import read_settings, trains_with_ppo


def check_plan(cfg: DictConfig, plan: PlanSettings) -> None:
    """Refuses, before anything is traced, what is no question, and what a run would refuse."""
    settings, _ = read_settings(cfg)
    together(checks_of_plan(settings, plan))


def checks_of_plan(settings: Settings, plan: PlanSettings) -> Iterator[Callable[[], object]]:
    """Each raises ConfigError by itself."""
    cfg, adaptive = settings.config, settings.adaptive
    yield lambda: check_advice(cfg, plan)
    yield lambda: lengths(cfg, adaptive, plan)
    for ranks in plan.several_ranks:
        one = replace(plan, world_size=ranks)
        yield partial(budget, one, adaptive, on_gpu=on_gpu(settings))
        yield partial(mesh_shape, settings, ranks)
        yield partial(_check_ranks, settings, ranks)
    yield lambda: obstacle_to_recovery(settings)


def _check_ranks(settings: Settings, ranks: int) -> None:
    """What else a run on so many ranks refuses."""
    limits = settings.adaptive.memory_limit
    if limits is not None and on_gpu(settings):  # on a CPU the command names another
        size_for_rank(limits, 0, ranks, "adaptive.memory_limit")
    if trains_with_ppo(settings.config):
        read_ppo_settings(settings.config)[1].iterations(ranks)
