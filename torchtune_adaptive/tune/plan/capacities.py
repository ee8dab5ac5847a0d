"""From a config to what fits: trace a step, fit a law, see how many rows fit, check against another trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from omegaconf import DictConfig

from torchtune_adaptive.errors import PredictionError
from torchtune_adaptive.limits.rounding import rungs_up_to
from torchtune_adaptive.prediction.capacity import MOST_ROWS, Budget, Capacity
from torchtune_adaptive.prediction.law import MemoryLaw, peak_of, sizes_of
from torchtune_adaptive.prediction.roofline import StepTime, Timing, WorkLaw
from torchtune_adaptive.tune.config.adaptive import AdaptiveConfig
from torchtune_adaptive.tune.config.rules import MOST_TOKENS
from torchtune_adaptive.tune.config.settings import on_gpu
from torchtune_adaptive.tune.plan.asked_token_budget import TokenBudget
from torchtune_adaptive.tune.plan.notes import notes_on_capacity, notes_on_question
from torchtune_adaptive.tune.plan.question import PlanSettings
from torchtune_adaptive.tune.plan.settings import (
    ASSUMED_TOKENS,
    Lengths,
    budget,
    card_of,
    check_row_lengths,
    lengths,
    link_bytes_per_s,
)
from torchtune_adaptive.tune.rl.stages import STAGES, TRAIN_POLICY
from torchtune_adaptive.tune.trace.fakes import FakeStep
from torchtune_adaptive.tune.trace.laws import TRACED_ROWS, OneRow, Traced, law_of, laws_of
from torchtune_adaptive.tune.trace.steps import fake_steps
from torchtune_adaptive.tune.trace.which_recipe import read_settings, trains_on_pairs, trains_with_ppo

CHECKED_TOKENS = 2**22
"""Tokens and labels are the one thing of a traced step that is there with its data."""
TOLERANCE = 0.005


@dataclass(frozen=True)
class Capacities:
    by_stage: Mapping[str, Sequence[Capacity]]
    """One for each length, of every stage; a step of one has no name."""
    trains: str
    """The stage that updates the model."""
    longest: int
    """What the model takes."""
    tokens_of_row: Mapping[str, Callable[[int], int]]
    """Tokens of a row in a stage, if so many are asked about: those of both answers, or with those of the answer."""
    token_budgets: Mapping[str, TokenBudget]
    """What is asked of each stage, where microbatches go by tokens."""
    largest_error: float
    """Largest error of the law against a step that was traced directly, as a share."""
    notes: Sequence[str]
    """What was assumed, and what is not modelled."""
    time: StepTime | None
    """How long a step takes, where its kernels follow a law and all of them are in one stage."""

    @property
    def capacities(self) -> Sequence[Capacity]:
        """Capacities of the stage that updates the model."""
        return self.by_stage[self.trains]

    def stages(self, at: int) -> dict[str, Capacity]:
        """Capacities for one of the lengths, by stage."""
        return {stage: capacities[at] for stage, capacities in self.by_stage.items()}

    def batch_size(self, at: int) -> int:
        """What the config says for all stages together; 0 where nothing fits."""
        return min(capacity.chosen_rows for capacity in self.stages(at).values())

    def row_tokens(self, stage: str, at: int) -> int:
        """Tokens of a row of one of the lengths."""
        return self.tokens_of_row[stage](self.by_stage[stage][at].tokens)

    def budget_fits(self, stage: str, at: int) -> bool:
        """Whether the token budget of the config does, where it has one."""
        budget = self.token_budgets.get(stage)
        return budget is not None and budget.fits(self.by_stage[stage][at], self.row_tokens(stage, at))


def predict(
    cfg: DictConfig, plan: PlanSettings, traced: Traced, *, check: bool = True, if_it_fits: bool = False
) -> Capacities:
    """What fits at each length; `traced` is called after each of `traces(...)` traces.

    Without `check`, the first capacity is not traced itself, and only the stage that updates the model is looked at.
    With `if_it_fits` there is no check, and OneRowDoesNotFitError as soon as it is certain that not even one row does.
    """
    settings, _ = read_settings(cfg)
    adaptive, given = settings.adaptive, lengths(cfg, settings.adaptive, plan)
    have = budget(plan, adaptive, on_gpu=on_gpu(settings))
    with fake_steps(cfg, plan.ranks) as steps:
        trains = TRAIN_POLICY if TRAIN_POLICY in steps else next(iter(steps))
        training = steps[trains]
        longest = _longest(steps.values(), given)
        check_row_lengths(Lengths.of(adaptive), longest)
        wanted = given.tokens if given else (min(ASSUMED_TOKENS, longest),)
        one_row = OneRow(min(wanted), have.usable_bytes) if if_it_fits and training.fall_back is None else None
        asked = _Asked(wanted, have, traced, check=check, counting=len(steps) == 1, one_row=one_row)
        found = {stage: asked.of(step) for stage, step in steps.items() if check or stage == trains}
        notes = [*notes_on_question(plan, given, wanted), *asked.changed]
        return Capacities(
            by_stage={stage: each.capacities for stage, each in found.items()},
            trains=trains,
            longest=longest,
            tokens_of_row={stage: step.rows.tokens_of_row for stage, step in steps.items()},
            token_budgets=_token_budgets(steps, adaptive),
            largest_error=max((each.error for each in found.values()), key=abs),
            notes=[*notes, *notes_on_capacity(cfg, training, have, wanted)],
            time=_time(training, plan, found[trains].work) if len(steps) == 1 else None,
        )


@dataclass
class _Asked:
    """What is asked of each stage."""

    wanted: Sequence[int]
    """Lengths of rows."""
    have: Budget
    traced: Traced
    check: bool
    counting: bool
    """Whether what kernels do is counted, too."""
    one_row: OneRow | None
    changed: list[str] = field(default_factory=list)
    """What stages had to do without so that one row fits."""

    def of(self, step: FakeStep) -> _StageCapacities:
        first_length, traced = self.wanted[0], self.traced
        capacity_by = partial(Capacity, tokens=first_length, budget=self.have, rungs=_rungs(step))
        law, work = laws_of(step, first_length, traced, counting=self.counting, one_row=self.one_row)
        first, error = _checked(step, capacity_by, law, traced) if self.check else (capacity_by(law), 0.0)
        found = _StageCapacities([first, *map(first.at, self.wanted[1:])], error, work)
        too_long = [each.tokens for each in found.capacities if not each.most_rows_with_retries]
        if step.fall_back is None or not too_long:
            return found
        whole = len(too_long) == len(self.wanted)
        self.changed.append(f"{'' if whole else f'rows of {too_long} tokens: '}{step.fall_back()}")
        step.run_first()
        return found.where_it_fits(self.of(replace(step, fall_back=None)))


def _token_budgets(steps: Mapping[str, FakeStep], adaptive: AdaptiveConfig) -> dict[str, TokenBudget]:
    budget = adaptive.token_budget
    if budget is None:
        return {}
    return {
        stage: TokenBudget(budget, step.rows.most or step.settings.samples_per_step) for stage, step in steps.items()
    }


def _rungs(step: FakeStep) -> Sequence[int]:
    adaptive = step.settings.adaptive
    if adaptive.token_budget is not None:  # which is not rounded
        return rungs_up_to(step.rows.most or MOST_ROWS, "none")
    most = min(adaptive.max_batch_size or MOST_ROWS, step.rows.most or MOST_ROWS)
    return rungs_up_to(most, adaptive.round_to, step.settings.samples_per_step)


class _StageCapacities(NamedTuple):
    """One stage of a step."""

    capacities: list[Capacity]
    error: float
    """Error of the law against a step that was traced directly, as a share."""
    work: WorkLaw | None

    def where_it_fits(self, fallback: _StageCapacities) -> _StageCapacities:
        """These, and for lengths of which not even one row fits those of another way to run the stage."""
        both = zip(self.capacities, fallback.capacities, strict=True)
        error = max(self.error, fallback.error, key=abs)
        return fallback._replace(capacities=[a if a.most_rows_with_retries else b for a, b in both], error=error)


def _time(step: FakeStep, plan: PlanSettings, work: WorkLaw | None) -> StepTime | None:
    if work is None:
        return None
    card = card_of(plan, on_gpu=step.on_gpu)
    on_host = step.host_bytes if step.settings.fsdp_cpu_offload else 0
    half = step.settings.dtype == "bf16"
    return StepTime(work, Timing(card, half, link_bytes_per_s(plan, card), plan.ranks, on_host))


def _checked(
    step: FakeStep, capacity_by: Callable[[MemoryLaw], Capacity], law: MemoryLaw, traced: Traced
) -> tuple[Capacity, float]:
    """A capacity, and how far it is from the step itself."""
    capacity = capacity_by(law)
    error = _error(step, capacity)
    traced()
    if abs(error) > TOLERANCE and step.settings.compile:  # the program is another for as few rows, or as many
        capacity = capacity_by(law_of(step, capacity.tokens, traced, rows=_checked_rows(capacity)))
        error = _error(step, capacity)
    if abs(error) > TOLERANCE:
        raise PredictionError(
            f"the prediction for {_checked_rows(capacity)} rows of {capacity.tokens} tokens is {100 * error:+.1f} % "
            f"off what that step allocates (allowed: {100 * TOLERANCE} %), so its memory cannot be predicted; measure "
            "on the device with use_maximum_batch_size: True"
        )
    return capacity, error


def traces(cfg: DictConfig) -> int:
    return (2 * len(TRACED_ROWS) + 1) * (len(STAGES) if trains_with_ppo(cfg) else 2 if trains_on_pairs(cfg) else 1)


def frontier(found: Capacities) -> list[Capacity]:
    """Capacities from an eighth of the first length to eight times as long, as far as the model goes."""
    first = found.capacities[0]
    lengths = (int(first.tokens * 2.0**exponent) for exponent in range(-3, 4))
    return [first.at(tokens) for tokens in lengths if 1 <= tokens <= found.longest]


def _longest(steps: Iterable[FakeStep], given: Lengths | None) -> int:
    """What the models take, which has to be as long as what is given."""
    wanted = max(given.tokens) if given else ASSUMED_TOKENS
    allowed = min(step.most_tokens(wanted) for step in steps)
    check_row_lengths(given, allowed)
    return allowed


def _checked_rows(capacity: Capacity) -> int:
    """What fits, or as many rows as can be traced."""
    return max(2, min(capacity.most_rows, CHECKED_TOKENS // capacity.tokens))


def _error(step: FakeStep, capacity: Capacity) -> float:
    """How far a capacity is from the step itself, of a length that the law knows, compiled anew for just this size."""
    rows = _checked_rows(capacity)
    if step.settings.compile:
        torch.compiler.reset()
    recording = step.record(rows, min(capacity.counted_tokens, step.most_tokens(MOST_TOKENS)))
    direct = peak_of(recording.phases, sizes_of(recording), caches=step.on_gpu).peak_bytes or 0
    return (capacity.peak(rows).peak_bytes or 0) / direct - 1
