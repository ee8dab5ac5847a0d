"""Print the predicted memory and time of a recipe: the command `tune-adaptive plan`."""

import json
from collections.abc import Sequence
from functools import partial

from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.command_line import locate, name_of, read_config
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.rehearse.sweep import as_table, compare, ranking
from torchtune_adaptive.rehearse_recipe.changes import changes_that_fit, training_command
from torchtune_adaptive.rehearse_recipe.request import PLAN_KEYS, read_request
from torchtune_adaptive.rehearse_recipe.start import rehearse_recipe


def print_plan(config: str, overrides: Sequence[str]) -> None:
    """Print the prediction for a config, given its name or path; raise an AdaptiveError if the config does not fit."""
    path = locate(config)
    cfg = read_config(path, overrides)
    check_keys(cfg, PLAN_KEYS, log=True)
    request = read_request(cfg, name_of(path), overrides)
    plan, run = request.plan, partial(rehearse_recipe, request)
    rows = compare(run, (), request.gpus, request.ranks)
    if all(row.fits is None for row in rows):
        raise AdaptiveError(rows[0].found.message or rows[0].found.verdict())
    as_text, fits = plan.format == "table", any(row.fits for row in rows)
    if as_text:
        print(request.heading, rows[0].found.as_text() if len(rows) == 1 else as_table(rows), sep="\n", flush=True)
    if not fits and plan.advise:
        largest = max(rows, key=lambda row: row.ranks * row.gpu.memory)
        fitting = changes_that_fit(request, run, largest)
        rows += fitting
        if as_text and fitting:
            print("", as_table(fitting), sep="\n", flush=True)
    best = min((row for row in rows if row.fits), key=ranking, default=None)
    if not as_text:
        commands = ({"command": training_command(request, row) if row.fits else None} for row in rows)
        print(json.dumps([row.as_dict() | command for row, command in zip(rows, commands, strict=True)], indent=2))
    elif best is not None:
        print(f"\ntrain with: {training_command(request, best)}")
    if not fits:
        remedy = (
            "no change of it fits: lower sequence_length, or use a larger GPU" if plan.advise else "set advise=True"
        )
        raise AdaptiveError(f"the config does not fit; {remedy if best is None else 'the settings above fit'}")
