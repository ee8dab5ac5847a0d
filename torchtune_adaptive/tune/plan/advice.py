"""Settings beside those of the config: what fits then, and how fast it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from omegaconf import DictConfig

from torchtune_adaptive.errors import OneRowDoesNotFitError
from torchtune_adaptive.prediction.capacity import Capacity
from torchtune_adaptive.prediction.cards import card_named
from torchtune_adaptive.prediction.outcome import Outcome, at_least, cheapest_first, fastest_first, outcome_of
from torchtune_adaptive.tune.config.components import in_a_line
from torchtune_adaptive.tune.config.settings import on_gpu
from torchtune_adaptive.tune.parts.preference_stages import REFERENCE
from torchtune_adaptive.tune.plan import printed
from torchtune_adaptive.tune.plan.capacities import Capacities, predict
from torchtune_adaptive.tune.plan.overrides import (
    Overrides,
    changed,
    checkpointing,
    combinations,
    compiled,
    in_8_bits,
    merged,
    save_resident,
    savers,
    starts,
)
from torchtune_adaptive.tune.plan.question import MOST_RANKS, PlanSettings, Question
from torchtune_adaptive.tune.rl.stages import FORWARD, GENERATE
from torchtune_adaptive.tune.trace.laws import Traced
from torchtune_adaptive.tune.trace.which_recipe import read_settings, trains_with_ppo
from torchtune_adaptive.wording import count_of

ENOUGH = 2
"""Combinations that fit, after which no more are tried."""
WITHOUT_BACKWARD = {REFERENCE, GENERATE, *FORWARD}
"""Stages in which checkpointing activations saves nothing."""
MOST_MORE_RANKS = 8
"""Times as many as were asked for."""


@dataclass(frozen=True)
class Advice:
    """Other settings, in the order in which to try them."""

    by_speed: bool
    """Whether all that were tried are there by their speed, and not only those that fit by their cost."""
    outcomes: Sequence[Outcome]
    notes: Sequence[str]
    stage: str = ""
    """The stage that this is about, where there are several."""

    @property
    def best(self) -> Outcome | None:
        """The first that fits, where it is not the config as it is."""
        first = next((each for each in self.outcomes if each.fits), None)
        return first if first and (first.name or not self.by_speed) else None

    def lines(self, ranks: int) -> list[str]:
        heading = [f"for {self.stage}:"] if self.stage else []
        return [*heading, (printed.speeds if self.by_speed else printed.fitting)(self.outcomes, ranks)]


def advised_length(question: Question, found: Capacities) -> int | None:
    """The index of the length to advise on: the first where that is asked for, and, unless it is declined, the first of
    which not even one row fits; None where there is no advice."""
    if question.plan.advise is False or trains_with_ppo(question.cfg):
        return None
    if question.plan.advise:
        return 0
    return next((at for at in range(len(found.capacities)) if not found.batch_size(at)), None)


def ways_out(cfg: DictConfig, short: Mapping[str, Capacity]) -> list[str]:
    """What to do where not even one row fits in some stages and nothing is tried: what costs least comes first."""
    found = []
    if all(each.within(replace(each.budget, expandable_segments=True)).most_rows for each in short.values()):
        found.append("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    if not all(each.at(1).most_rows_with_retries for each in short.values()):  # so it is not activations
        return [*found, "train on more ranks", "use smaller models, or an optimizer with less state"]
    found.append(f"lower sequence_length{' or max_generated_tokens' if trains_with_ppo(cfg) else ''}")
    everywhere = checkpointing(cfg)[2]
    if everywhere and not WITHOUT_BACKWARD.issuperset(short):
        found.append(f"set {' and '.join(each.replace('=', ': ') for each in everywhere)}")
    return [*found, "train on more ranks"]


def advise(question: Question, found: Capacities, at: int, traced: Traced) -> Advice:
    """What is asked for, or what fits where nothing does as it is, in rows of one of the lengths."""
    by_speed = bool(question.plan.advise and found.time)
    others = Alternatives(question.cfg, question.plan, found, at, traced, if_it_fits=not by_speed)
    outcomes = what_is_fastest(others) if by_speed else what_fits(others)
    if by_speed and not any(each.fits for each in outcomes):
        outcomes, by_speed = what_fits(others), False
    return Advice(by_speed, outcomes, [*_notes(question.plan, found), *others.notes()], found.trains)


class Compared(NamedTuple):
    """One config on several numbers of ranks."""

    outcomes: Sequence[Outcome]
    """One for each number of ranks, length and stage."""
    capacities: Sequence[tuple[Question, Capacities]]
    notes: Sequence[str]
    """What this assumes."""

    @property
    def largest_error(self) -> float:
        return max((found.largest_error for _, found in self.capacities), key=abs)


def on_ranks(question: Question, traced: Traced) -> Compared:
    """One config on each number of ranks that was asked for."""
    outcomes, capacities, notes = [], [], dict[str, None]()
    for ranks in question.plan.several_ranks:
        one = question.on(ranks)
        found = predict(one.cfg, one.plan, traced)
        capacities.append((one, found))
        for at in range(len(found.capacities)):
            outcomes += [
                outcome_of(stage, ranks, each, found.time, found.time) for stage, each in found.stages(at).items()
            ]
        notes.update(dict.fromkeys([*found.notes, *_notes(one.plan, found)]))
    return Compared(outcomes, capacities, list(notes))


def _notes(plan: PlanSettings, found: Capacities) -> list[str]:
    if found.trains:
        return ["step times are not predicted for steps with several stages"]
    if found.time is None:
        return ["step times are not predicted: the kernels depend on the number of rows"]
    timing = found.time.timing
    whose = f"of {plan.memory_limit}" if card_named(plan.memory_limit) else "of an a100 (memory_limit names no card)"
    link = f", a link of {timing.link_bytes_per_s / 1e9:.0f} GB/s (link_bandwidth)" if plan.ranks > 1 else ""
    if not timing.card.queues:
        whose = "of roughly one core"
    return [
        f"times are estimated from operations and bytes at the speeds {whose}{link}; they are not measured, and other "
        "settings are not checked"
    ]


@dataclass
class Alternatives:
    """Outcomes of other settings, each traced once."""

    cfg: DictConfig
    plan: PlanSettings
    found: Capacities
    at: int
    """Index of the length that this is about."""
    traced: Traced
    if_it_fits: bool = False
    """Whether of what does not fit no more is wanted than that."""
    outcomes: dict[tuple[Overrides, int], Outcome | None] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Why some cannot be predicted, by their name."""

    @property
    def as_it_is(self) -> Capacity:
        return self.found.capacities[self.at]

    def notes(self) -> list[str]:
        """What could not be compared, in a note."""
        return [f"not predicted: {name} ({why})" for name, why in self.failed.items()]

    def outcome(self, overrides: Overrides, ranks: int | None = None) -> Outcome | None:
        """Outcome of these overrides; None where the recipe does not take them, or they cannot be predicted."""
        key = overrides, ranks or self.plan.ranks
        if key == ((), self.plan.ranks):
            return self._named(outcome_of("", self.plan.ranks, self.as_it_is, self.found.time, self.found.time))
        if key not in self.outcomes:
            self.outcomes[key] = self._predicted(*key)
        return self.outcomes[key]

    def _predicted(self, overrides: Overrides, ranks: int) -> Outcome | None:
        cfg = changed(self.cfg, overrides)
        if not starts(cfg):
            return None
        name, tokens = " ".join(overrides), self.as_it_is.tokens
        plan = replace(self.plan, world_size=ranks, sequence_length=tokens)
        try:
            other = predict(cfg, plan, self.traced, check=False, if_it_fits=self.if_it_fits)
        except OneRowDoesNotFitError as error:
            return at_least(error.need_bytes or 0, name, ranks, tokens)
        except Exception as error:  # noqa: BLE001 - what torch fails on does not stand in the way of other settings
            self.failed[name or f"on {count_of(ranks, 'rank')}"] = in_a_line(error)
            return None
        return self._named(outcome_of(name, ranks, other.capacities[0], other.time, self.found.time))

    def _named(self, outcome: Outcome) -> Outcome:
        """The outcome, with a batch size or a token budget in its name where the config's is more than fits."""
        budget = self.found.token_budgets.get(self.found.trains)
        if budget is None:
            lower = f"batch_size={outcome.rows}" if 0 < outcome.rows < self.cfg.batch_size else ""
        else:
            fitting = outcome.rows * self.found.row_tokens(self.found.trains, self.at)
            more = isinstance(budget.asked, int) and budget.asked > fitting > 0
            lower = f"adaptive.token_budget={fitting}" if more else ""
        return replace(outcome, name=f"{outcome.name} {lower}".strip())


def what_fits(others: Alternatives) -> list[Outcome]:
    """Where nothing fits as it is: what does, that first which takes the least time."""
    single = savers(others.cfg, others.plan.ranks)
    first = others.as_it_is
    resident_bytes = first.peak(1).phase_bytes.get("optimizer state", 0)
    may_help = [each for each in single if resident_bytes < first.budget.usable_bytes or save_resident(each)]
    tried = {each: others.outcome(each) for each in may_help}
    if not _fitting(tried.values()):
        tried |= dict(_until_enough(others, combinations(single)))
    more = [*_on_more_ranks(others)]
    if not _fitting([*tried.values(), *more]):
        needs = {overrides: each.one_row_bytes for overrides, each in tried.items() if each}
        more += _on_more_ranks(others, min(needs, key=needs.__getitem__)) if needs else []
    return cheapest_first([each for each in [*tried.values(), *more] if each])


def _fitting(outcomes: Iterable[Outcome | None]) -> list[Outcome]:
    return [each for each in outcomes if each and each.fits]


def _until_enough(others: Alternatives, several: list[Overrides]) -> Iterator[tuple[Overrides, Outcome | None]]:
    fitting = 0
    for overrides in several:
        tried = others.outcome(overrides)
        yield overrides, tried
        fitting += bool(tried and tried.fits)
        if fitting == ENOUGH:
            return


def _on_more_ranks(others: Alternatives, overrides: Overrides = ()) -> Iterator[Outcome | None]:
    """The config, as it is or with these changes, on twice as many until it fits."""
    ranks = 2 * others.plan.ranks
    while ranks <= min(MOST_RANKS, MOST_MORE_RANKS * others.plan.ranks):
        tried = others.outcome(overrides, ranks)
        yield tried
        if tried is None or tried.fits:
            return
        ranks *= 2


def what_is_fastest(others: Alternatives) -> list[Outcome]:
    """Checkpointing more and less, each compiled and not; around the fastest of these, what costs or gains little."""
    settings, _ = read_settings(others.cfg)
    switches: list[Overrides] = [(), compiled(settings)]
    ways = [merged(switch, each) for switch in dict.fromkeys(switches) for each in checkpointing(others.cfg)]
    tried = {overrides: others.outcome(overrides) for overrides in dict.fromkeys([(), *ways])}
    fitting = {overrides: each for overrides, each in tried.items() if each and each.fits}
    if fitting:
        fastest = max(fitting, key=lambda overrides: fitting[overrides].tokens_per_s)
        for more in _around(others.cfg, others.plan.ranks):
            tried[merged(fastest, more)] = others.outcome(merged(fastest, more))
    return fastest_first([each for each in tried.values() if each])


def _around(cfg: DictConfig, ranks: int) -> list[Overrides]:
    settings, _ = read_settings(cfg)
    found = [in_8_bits(cfg)] if on_gpu(settings) else []
    if ranks > 1:
        found.append((f"fsdp_reshard_after_forward={not settings.fsdp_reshard_after_forward}",))
    return [each for each in found if each]
