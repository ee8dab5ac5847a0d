"""What will fit, predicted without a GPU, without weights and without data.

    tune run adaptive_plan --config llama3_1/8B_full world_size=8 memory_limit=80GB sequence_length=4096

Takes every config of the recipes for finetuning, preference training and PPO, torchtune's and ours, unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig

from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.record.charts.outcomes import draw_speeds
from torchtune_adaptive.record.charts.predictions import draw
from torchtune_adaptive.record.files import reason
from torchtune_adaptive.tune.config.adaptive import read_adaptive
from torchtune_adaptive.tune.console import progress_bar
from torchtune_adaptive.tune.plan import printed
from torchtune_adaptive.tune.plan.advice import Advice, advise, advised_length, on_ranks, ways_out
from torchtune_adaptive.tune.plan.answers import Answers, frontier, heading, predict, traces
from torchtune_adaptive.tune.plan.commands import Wanted, command, notes_on_samples
from torchtune_adaptive.tune.plan.overrides import changed
from torchtune_adaptive.tune.plan.question import PlanSettings
from torchtune_adaptive.tune.plan.settings import PLAN_KEYS, read_plan_settings
from torchtune_adaptive.tune.start import launch
from torchtune_adaptive.tune.start.command_line import name_of
from torchtune_adaptive.tune.trace.recipes import as_finetuning, trains_with_ppo
from torchtune_adaptive.tune.validate.plan import check_plan


def answer(cfg: DictConfig) -> None:
    settings, cfg = read_plan_settings(cfg), as_finetuning(cfg)
    check_plan(cfg, settings)
    (compare if len(settings.several_ranks) > 1 else answer_one)(cfg, settings)


def answer_one(cfg: DictConfig, settings: PlanSettings) -> None:
    """What fits, and advice."""
    with progress_bar("tracing", traces(cfg), "steps") as bar:
        found = predict(cfg, settings, traced=bar.update)
    advice = FORMATS[settings.format](cfg, settings, found)
    if settings.picture is not None:
        picture(Path(settings.picture).resolve(), cfg, settings, found, advice)


def compare(cfg: DictConfig, settings: PlanSettings) -> None:
    """The same question for several numbers of ranks, in one table."""
    with progress_bar("tracing", traces(cfg) * len(settings.several_ranks), "steps") as bar:
        compared = on_ranks(cfg, settings, traced=bar.update)
    rows = printed.by_ranks_for_programs(compared.outcomes)
    if settings.format == "json":
        told = {
            (one.ranks, found.answers[at].tokens): commands(cfg, one, found, at)
            for one, found in compared.answers
            for at in range(len(found.answers))
        }
        rows = [{**row, "command": next(iter(told[row["ranks"], row["tokens"]]), None)} for row in rows]
        lines = [line for each in told.values() for line in each]
        print(printed.as_json(rows, compared.notes, commands=lines, largest_error=compared.largest_error))
    elif settings.format == "csv":
        print(printed.as_csv(rows))
        tell(compared.notes, sys.stderr)
    else:
        print(printed.by_ranks(compared.outcomes))
        print(printed.checked(compared.largest_error))
        tell(compared.notes)


def picture(path: Path, cfg: DictConfig, settings: PlanSettings, found: Answers, advice: Advice | None) -> None:
    """Settings by their speed where that was asked for, else what fits."""
    first = found.answers[0]
    title = heading(cfg, settings, first, found.trains)
    try:
        if advice is None or not advice.by_speed:
            draw(path, first, frontier(found), title)
            return
        names = [printed.name_of(each, settings.ranks) for each in advice.outcomes]
        draw_speeds(path, advice.outcomes, names, first.budget.usable_bytes, title)
    except OSError as error:
        raise AdaptiveError(f"picture '{path}' cannot be written: {reason(error)}; give another place") from error


def as_table(cfg: DictConfig, settings: PlanSettings, found: Answers) -> Advice | None:
    """The answer before the advice, which may take longer."""
    advice, advised = None, advised_length(cfg, settings, found)
    for at in range(len(found.answers)):
        of_one = of_rollouts if trains_with_ppo(cfg) else of_a_step
        lines = of_one(cfg, settings, found, at, with_advice=at == advised)
        lines += [f"measure it with: {line}" for line in commands(cfg, settings, found, at)]
        print(*lines, sep="\n", flush=True)
        if at == advised:
            advice = advice_on(cfg, settings, found, at)
            print(*advice.lines(settings.ranks), *best_command(cfg, settings, advice), sep="\n")
    print(printed.checked(found.largest_error))
    tell(notes_of(cfg, found, advice))
    return advice


def of_a_step(cfg: DictConfig, settings: PlanSettings, found: Answers, at: int, *, with_advice: bool) -> list[str]:
    """A table for each stage, of which there are one or two."""
    parts = []
    for stage, each in found.stages(at).items():
        parts += [heading(cfg, settings, each, stage), printed.table(each)]
        if each.chosen_rows:
            parts += [choice(cfg, found, stage, at)]
        else:
            parts += [printed.shortfall(each) if with_advice else printed.no_row(each, ways_out(cfg, {stage: each}))]
    return parts


def choice(cfg: DictConfig, found: Answers, stage: str, at: int) -> str:
    each, budget = found.by_stage[stage][at], found.token_budgets.get(stage)
    if budget is not None:
        return printed.choice_of_tokens(each, found.row_tokens(stage, at), budget, stage)
    at_most = read_adaptive(cfg.get("adaptive")).max_batch_size
    return printed.choice(each, f"rows of {stage}" if stage else "batch_size", at_most)


def of_rollouts(cfg: DictConfig, settings: PlanSettings, found: Answers, at: int, *, with_advice: bool) -> list[str]:
    """A line for each stage."""
    stages = found.stages(at)
    parts = [heading(cfg, settings, found.answers[at]), printed.stages(stages)]
    if not found.batch_size(at):
        short = {stage: each for stage, each in stages.items() if not each.chosen_rows}
        return [*parts, printed.no_row(next(iter(short.values())), ways_out(cfg, short))]
    too_much = [stage for stage in found.token_budgets if not found.budget_fits(stage, at)]
    return [*parts, *(choice(cfg, found, stage, at) for stage in too_much)]


def as_csv(cfg: DictConfig, settings: PlanSettings, found: Answers) -> None:
    """Without advice, which can be no row, nor can a note."""
    print(printed.as_csv(rows_of(found)))
    tell(found.notes, sys.stderr)


def as_json(cfg: DictConfig, settings: PlanSettings, found: Answers) -> Advice | None:
    advised = advised_length(cfg, settings, found)
    advice = None if advised is None else advice_on(cfg, settings, found, advised)
    rows = rows_of(found)
    lines = [commands(cfg, settings, found, at) for at in range(len(found.answers))]
    of_length = {answer.tokens: of_it for answer, of_it in zip(found.answers, lines, strict=True)}
    for row in rows:
        if row["chosen"]:
            row["command"] = next(iter(of_length[row["tokens"]]), None)
    told = printed.as_json(
        rows,
        notes_of(cfg, found, advice),
        advice=printed.alternatives(advice.outcomes) if advice else [],
        token_budgets=printed.budgets(found),
        commands=[line for of_it in lines for line in of_it],
        largest_error=found.largest_error,
    )
    print(told)
    return advice


def advice_on(cfg: DictConfig, settings: PlanSettings, found: Answers, at: int) -> Advice:
    with progress_bar("tracing for advice", None, "steps") as bar:  # how many, only they can tell
        return advise(cfg, settings, found, at, traced=bar.update)


def rows_of(found: Answers) -> list[dict[str, Any]]:
    """Figures for programs, a row for each length and stage."""
    stages = [stage for at in range(len(found.answers)) for stage in found.stages(at).items()]
    return [{**({"stage": name} if name else {}), **row} for name, each in stages for row in printed.figures(each)]


def commands(cfg: DictConfig, settings: PlanSettings, found: Answers, at: int) -> list[str]:
    """What trains with the answer for a length; none where nothing fits."""
    rows = found.batch_size(at)
    return [command(cfg, settings, config_name(), Wanted.of(found, at), given=overrides())] if rows else []


def best_command(cfg: DictConfig, settings: PlanSettings, advice: Advice) -> list[str]:
    """What trains with the first line of the advice, whole."""
    if (best := advice.best) is None:
        return []
    words, one = best.name.split(), replace(settings, world_size=best.ranks)
    wanted = Wanted(best.rows, best.tokens, budget_fits=True)
    line = command(changed(cfg, tuple(words)), one, config_name(), wanted, given=[*overrides(), *words])
    return [f"measure the first with: {line}"]


def notes_of(cfg: DictConfig, found: Answers, advice: Advice | None) -> list[str]:
    return [*found.notes, *notes_on_samples(cfg, found.batch_size(0)), *(advice.notes if advice else ())]


def tell(notes: Sequence[str], file: TextIO | None = None) -> None:
    for note in notes:
        print(f"note: {note}", file=file)


FORMATS = {"table": as_table, "csv": as_csv, "json": as_json}


def config_name() -> str:
    return name_of(Path(sys.argv[sys.argv.index("--config") + 1]))


def overrides() -> list[str]:
    at = sys.argv.index("--config")
    return [*sys.argv[1:at], *sys.argv[at + 2 :]]


if __name__ == "__main__":
    launch.answer(answer, keys=PLAN_KEYS)
