"""The answer to a question, printed in the format that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtune_adaptive.memory_sizes import format_bytes
from torchtune_adaptive.prediction.capacity import Capacity
from torchtune_adaptive.tune.config.adaptive import read_adaptive
from torchtune_adaptive.tune.config.signatures import COMPONENT
from torchtune_adaptive.tune.plan import printed
from torchtune_adaptive.tune.plan.advice import Advice, Compared, advised_length, ways_out
from torchtune_adaptive.tune.plan.capacities import Capacities
from torchtune_adaptive.tune.plan.commands import advised_command, command_for_length, notes_on_samples
from torchtune_adaptive.tune.plan.question import Question
from torchtune_adaptive.tune.trace.which_recipe import is_lora, trains_with_ppo
from torchtune_adaptive.wording import count_of


def heading(question: Question, capacity: Capacity, stage: str = "") -> str:
    """A line that says what an answer is about."""
    cfg, have, length = question.cfg, capacity.budget, f"{capacity.tokens} tokens"
    if trains_with_ppo(cfg):
        length = f"prompts of {length}, answers of {cfg.max_generated_tokens}"
    parts = [
        str(cfg.model.get(COMPONENT)).rpartition(".")[2],
        "PPO" if trains_with_ppo(cfg) else "lora" if is_lora(cfg) else "full",
        *([stage] if stage else []),
        count_of(question.plan.ranks, "rank"),
        *(["compiled"] if cfg.get("compile") else []),
        *(["activation checkpointing"] if cfg.get("enable_activation_checkpointing") else []),
        *(["activation offloading"] if cfg.get("enable_activation_offloading") else []),
        length,
        f"{format_bytes(have.usable_bytes)} usable of {format_bytes(have.limit_bytes)}",
    ]
    return " · ".join(parts)


@dataclass(frozen=True)
class Output:
    """The answer to a question about one number of ranks."""

    question: Question
    found: Capacities
    advise_on: Callable[[int], Advice]
    """Advice on one of the lengths."""

    def show(self) -> None:
        """Prints the answer."""
        if self.question.plan.format == "json":
            self._as_json()
        else:
            self._as_table()

    def _as_table(self) -> None:
        """The answer before the advice, which may take longer."""
        advice, advised = None, advised_length(self.question, self.found)
        for at in range(len(self.found.capacities)):
            if trains_with_ppo(self.question.cfg):
                lines = self._of_rollouts(at)
            else:
                lines = self._of_a_step(at, with_advice=at == advised)
            if measured_with := command_for_length(self.question, self.found, at):
                lines.append(f"measure it with: {measured_with}")
            print(*lines, sep="\n", flush=True)
            if at == advised:
                advice = self.advise_on(at)
                print(*advice.lines(self.question.plan.ranks), sep="\n")
                if advice.best:
                    print(f"measure the first with: {advised_command(self.question, advice.best)}")
        print(printed.checked(self.found.largest_error))
        _tell(self._notes(advice))

    def _of_a_step(self, at: int, *, with_advice: bool) -> list[str]:
        """A table for each stage, of which there are one or two."""
        parts = []
        for stage, each in self.found.stages(at).items():
            parts += [heading(self.question, each, stage), printed.table(each)]
            if each.chosen_rows:
                parts.append(self._choice(stage, at))
            elif with_advice:
                parts.append(printed.shortfall(each))
            else:
                parts.append(printed.no_row(each, ways_out(self.question.cfg, {stage: each})))
        return parts

    def _of_rollouts(self, at: int) -> list[str]:
        """A line for each stage."""
        stages = self.found.stages(at)
        parts = [heading(self.question, self.found.capacities[at]), printed.stages(stages)]
        if not self.found.batch_size(at):
            short = {stage: each for stage, each in stages.items() if not each.chosen_rows}
            return [*parts, printed.no_row(next(iter(short.values())), ways_out(self.question.cfg, short))]
        too_much = [stage for stage in self.found.token_budgets if not self.found.budget_fits(stage, at)]
        return [*parts, *(self._choice(stage, at) for stage in too_much)]

    def _choice(self, stage: str, at: int) -> str:
        each, budget = self.found.by_stage[stage][at], self.found.token_budgets.get(stage)
        if budget is not None:
            return printed.choice_of_tokens(each, self.found.row_tokens(stage, at), budget, stage)
        at_most = read_adaptive(self.question.cfg.get("adaptive")).max_batch_size
        return printed.choice(each, f"rows of {stage}" if stage else "batch_size", at_most)

    def _as_json(self) -> None:
        advised = advised_length(self.question, self.found)
        advice = None if advised is None else self.advise_on(advised)
        commands = [command_for_length(self.question, self.found, at) for at in range(len(self.found.capacities))]
        of_length = {capacity.tokens: one for capacity, one in zip(self.found.capacities, commands, strict=True)}
        told = printed.as_json(
            [{**row, "command": of_length[row["tokens"]]} if row["chosen"] else row for row in self._rows()],
            self._notes(advice),
            advice=printed.alternatives(advice.outcomes) if advice else [],
            token_budgets=printed.budgets(self.found),
            commands=[each for each in commands if each],
            largest_error=self.found.largest_error,
        )
        print(told)

    def _rows(self) -> list[dict[str, Any]]:
        """Figures for programs, a row for each length and stage."""
        return [
            {**({"stage": stage} if stage else {}), **row}
            for at in range(len(self.found.capacities))
            for stage, each in self.found.stages(at).items()
            for row in printed.figures(each)
        ]

    def _notes(self, advice: Advice | None) -> list[str]:
        on_samples = notes_on_samples(self.question.cfg, self.found.batch_size(0))
        return [*self.found.notes, *on_samples, *(advice.notes if advice else ())]


def show_compared(compared: Compared, form: str) -> None:
    """Prints one table for several numbers of ranks."""
    rows = printed.by_ranks_for_programs(compared.outcomes)
    if form == "json":
        commands = {
            (one.plan.ranks, found.capacities[at].tokens): command_for_length(one, found, at)
            for one, found in compared.capacities
            for at in range(len(found.capacities))
        }
        of_outcomes = [commands[each.ranks, each.tokens] for each in compared.outcomes]
        rows = [{**row, "command": one} for row, one in zip(rows, of_outcomes, strict=True)]
        lines = [each for each in commands.values() if each]
        print(printed.as_json(rows, compared.notes, commands=lines, largest_error=compared.largest_error))
    else:
        print(printed.by_ranks(compared.outcomes))
        print(printed.checked(compared.largest_error))
        _tell(compared.notes)


def _tell(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}")
