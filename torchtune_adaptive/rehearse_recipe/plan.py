"""Print the predicted memory and time of a recipe: the command `tune-adaptive plan`."""

import json
import re
import shlex
from collections.abc import Sequence
from functools import partial

from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.command_line import locate, name_of, read_config
from torchtune_adaptive.config.keys import keys_of, value_at
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.rehearse.start import ONE_MACHINE
from torchtune_adaptive.rehearse.sweep import SweepRow, as_table, compare, ranking
from torchtune_adaptive.rehearse_recipe.request import PLAN_KEYS, PlanRequest, PlanSettings, read_request
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
    best = min((row for row in rows if row.fits), key=ranking, default=None)
    if not as_text:
        commands = ({"command": training_command(request, row) if row.fits else None} for row in rows)
        print(json.dumps([row.as_dict() | command for row, command in zip(rows, commands, strict=True)], indent=2))
    elif best is not None:
        print(f"\ntrain with: {training_command(request, best)}")
    if not fits:
        raise AdaptiveError(
            "the config does not fit: lower batch_size or sequence_length, set enable_activation_checkpointing=True, "
            "or use more ranks or a larger GPU"
        )


def training_command(request: PlanRequest, row: SweepRow) -> str:
    """Return the command that trains on the ranks of a row, with the overrides of the request."""
    cfg, own = request.cfg, keys_of(PlanSettings)
    words = [word for word in request.overrides if re.split("[.=]", word)[0] not in own]
    if request.searches_rows and not cfg.get("use_maximum_batch_size"):
        words.append("use_maximum_batch_size=True")
    if request.plan.sequence_length is not None and value_at(cfg, "tokenizer.max_seq_len") != request.length:
        words.append(f"tokenizer.max_seq_len={request.length}")
    if value_at(cfg, "adaptive.memory_limit") is not None:
        words.append("adaptive.memory_limit=null")
    machines, left = divmod(row.ranks, ONE_MACHINE)
    launcher = f"--nproc_per_node {row.ranks}"
    if machines > 1 and not left:
        rendezvous = "--rdzv_backend c10d --rdzv_endpoint NODE0:29400"
        launcher = f"--nnodes {machines} --nproc_per_node {ONE_MACHINE} {rendezvous}"
    last = {word.lstrip("~").partition("=")[0]: word for word in words}  # the last word of a key has effect
    parts = ["tune run", launcher, request.recipe.name, "--config", request.config_name, shlex.join(last.values())]
    return " ".join(parts).rstrip()
