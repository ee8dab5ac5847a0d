"""What will fit, predicted without a GPU, without weights and without data.

    tune run adaptive_plan --config llama3_1/8B_full world_size=8 memory_limit=80GB sequence_length=4096

Takes every config of the recipes for finetuning, preference training and PPO, torchtune's and ours, unchanged.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.record.charts.outcomes import draw_speeds
from torchtune_adaptive.record.charts.predictions import draw
from torchtune_adaptive.record.files import reason
from torchtune_adaptive.tune.console import progress_bar
from torchtune_adaptive.tune.plan import printed
from torchtune_adaptive.tune.plan.advice import Advice, advise, on_ranks
from torchtune_adaptive.tune.plan.answers import Answers, command, frontier, heading, predict, traces
from torchtune_adaptive.tune.plan.keys import PlanSettings
from torchtune_adaptive.tune.plan.recipes import as_finetuning, trains_with_ppo
from torchtune_adaptive.tune.plan.settings import check_advice, read_plan_settings
from torchtune_adaptive.tune.rl.settings import PPO_KEYS, PPO_SECTIONS
from torchtune_adaptive.tune.start import launch
from torchtune_adaptive.tune.start.configs import name_of


def answer(cfg: DictConfig) -> None:
    settings, cfg = read_plan_settings(cfg), as_finetuning(cfg)
    check_advice(cfg, settings)
    (compare if len(settings.several_ranks) > 1 else answer_one)(cfg, settings)


def answer_one(cfg: DictConfig, settings: PlanSettings) -> None:
    """What fits, and advice."""
    with progress_bar("tracing", traces(cfg), "steps") as bar:
        found = predict(cfg, settings, traced=bar.update)
    advice = None
    if settings.format != "csv":  # of which advice can be no row, nor can a note
        with progress_bar("tracing for advice", None, "steps") as bar:  # how many, only they can tell
            advice = advise(cfg, settings, found, traced=bar.update)
    print(FORMATS[settings.format](cfg, settings, found, advice))
    if settings.format == "csv":
        for note in found.notes:
            print(f"note: {note}", file=sys.stderr)
    if settings.picture is not None:
        picture(Path(settings.picture), cfg, settings, found, advice)


def compare(cfg: DictConfig, settings: PlanSettings) -> None:
    """The same question for several numbers of ranks, in one table."""
    with progress_bar("tracing", traces(cfg) * len(settings.several_ranks), "steps") as bar:
        outcomes, notes = on_ranks(cfg, settings, traced=bar.update)
    rows = printed.alternatives(outcomes)
    if settings.format == "json":
        print(printed.as_json(rows, notes))
        return
    print(printed.by_ranks(outcomes) if settings.format == "table" else printed.as_csv(rows))
    for note in notes:
        print(f"note: {note}", file=sys.stdout if settings.format == "table" else sys.stderr)


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


def as_table(cfg: DictConfig, settings: PlanSettings, found: Answers, advice: Advice | None) -> str:
    parts = []
    for at in range(len(found.answers)):
        parts += (of_rollouts if trains_with_ppo(cfg) else of_a_step)(cfg, settings, found, advice, at)
        parts += [f"measure it with: {line}" for line in commands(cfg, settings, found, at)]
        if advice is not None and not found.trains and at == 0:  # it is about this length
            parts += advice.lines(settings.ranks)
    parts += [f"checked against a step traced directly: {100 * found.largest_error:+.2f} %"]
    parts += [f"note: {note}" for note in [*found.notes, *(advice.notes if advice else ())]]
    return "\n".join(parts)


def of_a_step(cfg: DictConfig, settings: PlanSettings, found: Answers, advice: Advice | None, at: int) -> list[str]:
    """A table for each stage, of which there are one or two."""
    parts = []
    for stage, each in found.stages(at).items():
        parts += [heading(cfg, settings, each, stage), printed.table(each)]
        key = f"rows of {stage}" if stage else "batch_size"
        parts += [printed.choice(each, key) if each.chosen_rows or advice is None else printed.shortfall(each)]
        if stage and stage == found.trains and advice is not None and at == 0:  # it is about this one
            parts += advice.lines(settings.ranks)
    return parts


def of_rollouts(cfg: DictConfig, settings: PlanSettings, found: Answers, advice: Advice | None, at: int) -> list[str]:
    """A line for each stage."""
    return [heading(cfg, settings, found.answers[at]), printed.stages(found.stages(at))]


def as_csv(cfg: DictConfig, settings: PlanSettings, found: Answers, advice: Advice | None) -> str:
    return printed.as_csv(rows_of(found))


def as_json(cfg: DictConfig, settings: PlanSettings, found: Answers, advice: Advice | None) -> str:
    return printed.as_json(
        rows_of(found),
        [*found.notes, *(advice.notes if advice else ())],
        advice=printed.alternatives(advice.outcomes) if advice else [],
        commands=[line for at in range(len(found.answers)) for line in commands(cfg, settings, found, at)],
        largest_error=found.largest_error,
    )


def rows_of(found: Answers) -> list[dict[str, Any]]:
    """Figures for programs, a row for each length and stage."""
    stages = [stage for at in range(len(found.answers)) for stage in found.stages(at).items()]
    return [{**({"stage": name} if name else {}), **row} for name, each in stages for row in printed.figures(each)]


def commands(cfg: DictConfig, settings: PlanSettings, found: Answers, at: int) -> list[str]:
    """What trains with the answer for a length; none where nothing fits."""
    rows = found.batch_size(at)
    return [command(cfg, settings, config_name(), rows, overrides())] if rows else []


FORMATS = {"table": as_table, "csv": as_csv, "json": as_json}


def config_name() -> str:
    return name_of(Path(sys.argv[sys.argv.index("--config") + 1]))


def overrides() -> list[str]:
    at = sys.argv.index("--config")
    return [*sys.argv[1:at], *sys.argv[at + 2 :]]


if __name__ == "__main__":
    launch.answer(answer, keys=[*PPO_SECTIONS, *PPO_KEYS, *(field.name for field in fields(PlanSettings))])
