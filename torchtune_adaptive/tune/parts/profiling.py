"""torchtune's profiler, and a record of CUDA's memory history over its active steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torchtune import training

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.tune.start import components

COMPONENT = "torchtune.training.setup_torch_profiler"


class StepProfiler:
    """Steps the profiler that the `profiler` section describes; without one, does nothing."""

    def __init__(self, section: DictConfig | None, *, record_memory: bool) -> None:
        self._steps = 0
        self._record_from = self._record_to = -1
        if section is None or not section.get("enabled", True):
            self._profiler = training.DummyProfiler()
            return
        if section.get("_component_", COMPONENT) != COMPONENT:
            raise ConfigError(f"profiler._component_ is {section['_component_']!r}: allowed is {COMPONENT}")
        # resolved here: apart from the whole config, ${output_dir} would be the section's own key
        values = OmegaConf.to_container(section, resolve=True)
        named = OmegaConf.merge({"_component_": COMPONENT}, values)
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


def build_profiler(cfg: DictConfig, device: torch.device) -> StepProfiler:
    return StepProfiler(cfg.get("profiler"), record_memory=device.type == "cuda" and dist.get_rank() == 0)
