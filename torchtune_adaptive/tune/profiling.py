"""torchtune's profiler, and a record of CUDA's memory history over its active steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torchtune import training

from torchtune_adaptive.config import components
from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import BOOL, NULL, check, one_of
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.text import shown

PROFILER = "torchtune.training.setup_torch_profiler"


class StepProfiler:
    """Steps the profiler that the `profiler` section describes; without one, does nothing."""

    def __init__(self, section: DictConfig | None, *, record_memory: bool) -> None:
        self._steps = 0
        self._record_from = self._record_to = -1
        if section is None or not is_enabled(section):
            self._profiler = training.DummyProfiler()
            return
        # resolved here: apart from the whole config, ${output_dir} would be the section's own key
        values = OmegaConf.to_container(section, resolve=True)
        named = OmegaConf.merge(values, {COMPONENT: PROFILER})
        self._profiler, chosen = components.build_section("profiler", named)
        if record_memory and chosen.get("profile_memory"):
            self._record_from = chosen["wait_steps"] + chosen["warmup_steps"]
            self._record_to = self._record_from + chosen["active_steps"]

    def start(self) -> None:
        self._profiler.start()
        self._switch_record()

    def step(self) -> None:
        self._steps += 1
        self._switch_record()
        self._profiler.step()

    def stop(self) -> None:
        self._profiler.stop()

    def _switch_record(self) -> None:
        if self._steps == self._record_from:
            torch.cuda.memory._record_memory_history()
        elif self._steps == self._record_to:
            torch.cuda.memory._record_memory_history(enabled=None)


def is_enabled(section: object) -> bool:
    """Checks what decides, also of a profiler that is off: it would be found out only when it is needed."""
    if not isinstance(section, DictConfig):
        raise ConfigError(f"profiler is {shown(section)}: allowed is a section with a _component_, or null")
    # on a command line, profiler=5 sets the component, and profiler=null removes it
    check(one_of(PROFILER) | NULL, section.get(COMPONENT), "profiler._component_")
    check(BOOL, enabled := section.get("enabled", True), "profiler.enabled")
    return bool(enabled)


def build_profiler(cfg: DictConfig, device: torch.device) -> StepProfiler:
    return StepProfiler(cfg.get("profiler"), record_memory=device.type == "cuda" and dist.get_rank() == 0)
