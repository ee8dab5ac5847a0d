"""From a config to what fits: trace, fit, answer, check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from omegaconf import DictConfig

from torchtune_adaptive.errors import PredictionError
from torchtune_adaptive.limits.rounding import rungs_up_to
from torchtune_adaptive.prediction.capacity import MOST_ROWS, Answer, Budget
from torchtune_adaptive.prediction.law import MemoryLaw, peak_of, sizes_of
from torchtune_adaptive.prediction.roofline import StepTime, Timing, WorkLaw
from torchtune_adaptive.tune.config.adaptive import AdaptiveConfig
from torchtune_adaptive.tune.config.rules import MOST_TOKENS
from torchtune_adaptive.tune.config.settings import on_gpu
from torchtune_adaptive.tune.plan.asked_token_budget import TokenBudget
from torchtune_adaptive.tune.plan.notes import notes_on_answer, notes_on_question
from torchtune_adaptive.tune.plan.question import PlanSettings
from torchtune_adaptive.tune.plan.settings import (
    ASSUMED_TOKENS,
    Lengths,
    budget,
    card_of,
    check_length,
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
class Answers:
    by_stage: Mapping[str, Sequence[Answer]]
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
    """What the answer assumes, and what is not modelled."""
    time: StepTime | None
    """How long a step takes, where its kernels follow a law and all of them are in one stage."""

    @property
    def answers(self) -> Sequence[Answer]:
        """Answers for the stage that updates the model."""
        return self.by_stage[self.trains]

    def stages(self, at: int) -> dict[str, Answer]:
        """The answers for one of the lengths, by stage."""
        return {stage: answers[at] for stage, answers in self.by_stage.items()}

    def batch_size(self, at: int) -> int:
        """What the config says for all stages together; 0 where nothing fits."""
        return min(answer.chosen_rows for answer in self.stages(at).values())

    def row_tokens(self, stage: str, at: int) -> int:
        """Tokens of a row of one of the lengths."""
        return self.tokens_of_row[stage](self.by_stage[stage][at].tokens)

    def budget_fits(self, stage: str, at: int) -> bool:
        """Whether the token budget of the config does, where it has one."""
        budget = self.token_budgets.get(stage)
        return budget is not None and budget.fits(self.by_stage[stage][at], self.row_tokens(stage, at))


def predict(
    cfg: DictConfig, plan: PlanSettings, traced: Traced, *, check: bool = True, if_it_fits: bool = False
) -> Answers:
    """What fits at each length; `traced` is called after each of `traces(...)` traces.

    Without `check`, the first answer is not traced itself, and only the stage that updates the model is answered for.
    With `if_it_fits` there is no check, and OneRowDoesNotFitError as soon as it is certain that not even one row does.
    """
    settings, _ = read_settings(cfg)
    adaptive, given = settings.adaptive, lengths(cfg, settings.adaptive, plan)
    have = budget(plan, adaptive, on_gpu=on_gpu(settings))
    with fake_steps(cfg, plan.ranks) as steps:
        trains = TRAIN_POLICY if TRAIN_POLICY in steps else next(iter(steps))
        training = steps[trains]
        longest = _longest(steps.values(), given)
        check_length(Lengths.of(adaptive), longest)
        wanted = given.tokens if given else (min(ASSUMED_TOKENS, longest),)
        one_row = OneRow(min(wanted), have.usable_bytes) if if_it_fits and training.otherwise is None else None
        asked = _Asked(wanted, have, traced, check=check, counting=len(steps) == 1, one_row=one_row)
        found = {stage: asked.of(step) for stage, step in steps.items() if check or stage == trains}
        notes = [*notes_on_question(plan, given, wanted), *asked.changed]
        return Answers(
            by_stage={stage: each.answers for stage, each in found.items()},
            trains=trains,
            longest=longest,
            tokens_of_row={stage: step.tokens_of_row for stage, step in steps.items()},
            token_budgets=_token_budgets(steps, adaptive),
            largest_error=max((each.error for each in found.values()), key=abs),
            notes=[*notes, *notes_on_answer(cfg, training, have, wanted)],
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

    def of(self, step: FakeStep) -> _StageAnswers:
        first_length, traced = self.wanted[0], self.traced
        answer_by = partial(Answer, tokens=first_length, budget=self.have, rungs=_rungs(step))
        law, work = laws_of(step, first_length, traced, counting=self.counting, one_row=self.one_row)
        first, error = _checked(step, answer_by, law, traced) if self.check else (answer_by(law), 0.0)
        found = _StageAnswers([first, *map(first.at, self.wanted[1:])], error, work)
        too_long = [each.tokens for each in found.answers if not each.most_rows_with_retries]
        if step.otherwise is None or not too_long:
            return found
        whole = len(too_long) == len(self.wanted)
        self.changed.append(f"{'' if whole else f'rows of {too_long} tokens: '}{step.otherwise()}")
        step.run_first()
        return found.where_it_fits(self.of(replace(step, otherwise=None)))


def _token_budgets(steps: Mapping[str, FakeStep], adaptive: AdaptiveConfig) -> dict[str, TokenBudget]:
    budget = adaptive.token_budget
    if budget is None:
        return {}
    return {
        stage: TokenBudget(budget, step.most_rows or step.settings.samples_per_step) for stage, step in steps.items()
    }


def _rungs(step: FakeStep) -> Sequence[int]:
    adaptive = step.settings.adaptive
    if adaptive.token_budget is not None:  # which is not rounded
        return rungs_up_to(step.most_rows or MOST_ROWS, "none")
    most = min(adaptive.max_batch_size or MOST_ROWS, step.most_rows or MOST_ROWS)
    return rungs_up_to(most, adaptive.round_to, step.settings.samples_per_step)


class _StageAnswers(NamedTuple):
    """One stage of a step."""

    answers: list[Answer]
    error: float
    """Error of the law against a step that was traced directly, as a share."""
    work: WorkLaw | None

    def where_it_fits(self, otherwise: _StageAnswers) -> _StageAnswers:
        """These answers, and those of another way to run the stage for lengths of which not even one row fits."""
        both = zip(self.answers, otherwise.answers, strict=True)
        error = max(self.error, otherwise.error, key=abs)
        return otherwise._replace(answers=[a if a.most_rows_with_retries else b for a, b in both], error=error)


def _time(step: FakeStep, plan: PlanSettings, work: WorkLaw | None) -> StepTime | None:
    if work is None:
        return None
    card = card_of(plan, on_gpu=step.on_gpu)
    on_host = step.host_bytes if step.settings.fsdp_cpu_offload else 0
    half = step.settings.dtype == "bf16"
    return StepTime(work, Timing(card, half, link_bytes_per_s(plan, card), plan.ranks, on_host))


def _checked(
    step: FakeStep, answer_by: Callable[[MemoryLaw], Answer], law: MemoryLaw, traced: Traced
) -> tuple[Answer, float]:
    """An answer, and how far it is from the step itself."""
    answer = answer_by(law)
    error = _error(step, answer)
    traced()
    if abs(error) > TOLERANCE and step.settings.compile:  # the program is another for as few rows, or as many
        answer = answer_by(law_of(step, answer.tokens, traced, rows=_checked_rows(answer)))
        error = _error(step, answer)
    if abs(error) > TOLERANCE:
        raise PredictionError(
            f"the prediction for {_checked_rows(answer)} rows of {answer.tokens} tokens is {100 * error:+.1f} % off "
            f"what that step allocates, allowed are {100 * TOLERANCE} %: its memory follows no law; measure on the "
            "device instead, with use_maximum_batch_size: True"
        )
    return answer, error


def traces(cfg: DictConfig) -> int:
    return (2 * len(TRACED_ROWS) + 1) * (len(STAGES) if trains_with_ppo(cfg) else 2 if trains_on_pairs(cfg) else 1)


def frontier(found: Answers) -> list[Answer]:
    """Answers from an eighth of the first length to eight times as long, as far as the model goes."""
    first = found.answers[0]
    lengths = (int(first.tokens * 2.0**exponent) for exponent in range(-3, 4))
    return [first.at(tokens) for tokens in lengths if 1 <= tokens <= found.longest]


def _longest(steps: Iterable[FakeStep], given: Lengths | None) -> int:
    """What the models take, which has to be as long as what is given."""
    wanted = max(given.tokens) if given else ASSUMED_TOKENS
    allowed = min(step.most_tokens(wanted) for step in steps)
    check_length(given, allowed)
    return allowed


def _checked_rows(answer: Answer) -> int:
    """What fits, or as many rows as can be traced."""
    return max(2, min(answer.most_rows, CHECKED_TOKENS // answer.tokens))


def _error(step: FakeStep, answer: Answer) -> float:
    """How far an answer is from the step itself, of the length that the law knows, compiled anew for just this size."""
    rows = _checked_rows(answer)
    if step.settings.compile:
        torch.compiler.reset()
    recording = step.record(rows, min(answer.counted_tokens, step.most_tokens(MOST_TOKENS)))
    direct = peak_of(recording.phases, sizes_of(recording), caches=step.on_gpu).peak_bytes or 0
    return (answer.peak(rows).peak_bytes or 0) / direct - 1
