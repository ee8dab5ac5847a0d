"""The stages of a step, over the same samples: each has a runner of its own, with its limit and its recoveries."""

from collections.abc import Mapping, Sequence

from torchtune_adaptive.limits.governor import LimitState
from torchtune_adaptive.limits.limit import Limit
from torchtune_adaptive.memory.device import MemorySource
from torchtune_adaptive.step.reports import StepResult
from torchtune_adaptive.step.runner import StepRunner
from torchtune_adaptive.step.samples import Sample


class Stages(dict[str, StepRunner[Sample]]):
    """What runs each stage, by its name and in their order: the last one trains. A single stage needs no name."""

    @property
    def training(self) -> StepRunner[Sample]:
        return [*self.values()][-1]

    @property
    def limits(self) -> dict[str, Limit]:
        return {stage: runner.limit for stage, runner in self.items()}

    @property
    def recoveries(self) -> int:
        return sum(runner.recoveries for runner in self.values())

    def run(
        self, samples: Sequence[Sample], *, step: int, upcoming: Sequence[Sample] | None = None
    ) -> dict[str, StepResult]:
        """Collective: all stages, one after the other. Each sample keeps what a stage says of it for those to come."""
        return {stage: runner.run(samples, step=step, upcoming=upcoming) for stage, runner in self.items()}

    def watch(self, memory: MemorySource | None) -> None:
        for runner in self.values():
            runner.watch(memory)

    def use_limits(self, limits: Mapping[str, Limit]) -> None:
        for stage, limit in limits.items():
            self[stage].use_limit(limit)

    def state_dict(self) -> dict[str, LimitState]:
        """What the limits have come to, by stage; the same on all ranks."""
        return {stage: runner.state_dict() for stage, runner in self.items()}
