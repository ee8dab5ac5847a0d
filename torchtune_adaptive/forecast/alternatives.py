"""Rehearse other settings that need less memory, beginning with those that slow training down the least."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence

from torchtune.config._utils import _get_component_from_path

from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.forecast.rehearse_recipe import Forecast, rehearse_recipe
from torchtune_adaptive.forecast.request import Overrides, PlanRequest, override
from torchtune_adaptive.rehearse.remedies import MORE_RANKS, that_fit

ENOUGH = 2
"""Stop after this many settings that fit, unless `advise` is True."""
IN_8_BITS = {"torch.optim.AdamW": "torchao.optim.AdamW8bit", "torch.optim.Adam": "torchao.optim.Adam8bit"}
ARGUMENTS_IN_8_BITS = {COMPONENT, "lr", "betas", "eps", "weight_decay", "amsgrad"}
"""Keys of an optimizer's section that torchao's optimizers accept."""
FEWER_ROWS: Overrides = ("use_maximum_batch_size=True",)
EVERY_SECOND_LAYER: Overrides = ("enable_activation_checkpointing=False", "ac_mode=selective", "ac_option=2")


def try_alternatives(request: PlanRequest) -> list[Forecast]:
    """Return settings that fit: fewer rows or, if none fit, other changes; with `advise=True`, all single changes."""
    single = [request.with_overrides(each) for each in changes_that_save_memory(request)]
    if request.plan.advise:
        return _that_fit(single, enough=0)
    fewer_rows = [request.with_overrides(FEWER_ROWS)] * ((request.batch_size or 1) > 1)
    combined = [request.with_overrides(each) for each in _combined([each.changes for each in single])]
    more_ranks = [request.with_ranks(times * request.ranks) for times in MORE_RANKS]
    return _that_fit(fewer_rows, enough=1) or _that_fit([*single, *combined, *more_ranks], ENOUGH)


def _that_fit(candidates: Sequence[PlanRequest], enough: int) -> list[Forecast]:
    cases = {" ".join(each.changes): (each,) for each in candidates if _is_valid(each)}
    return that_fit(_attempt, cases, enough)


def _attempt(candidate: PlanRequest) -> Forecast | None:
    try:
        return rehearse_recipe(candidate)
    except AdaptiveError as error:
        print(f"{' '.join(candidate.changes)}: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return None


def _combined(single: Sequence[Overrides]) -> list[Overrides]:
    """Combine each change with all changes before it, except for activation checkpointing of every second layer."""
    found: list[Overrides] = []
    combined: dict[str, str] = {}
    for overrides in single:
        if "ac_mode=selective" not in overrides:
            combined |= {each.partition("=")[0]: each for each in overrides}
            found.append(tuple(combined.values()))
    return found[1:]


def changes_that_save_memory(request: PlanRequest) -> list[Overrides]:
    """Return single changes that save memory, beginning with those that slow training down the least."""
    cfg, lora, optimizer = request.cfg, request.recipe.is_lora, request.cfg.optimizer.get(COMPONENT)
    all_layers: Overrides = ("enable_activation_checkpointing=True", *["ac_mode=null"] * bool(cfg.get("ac_mode")))
    found: list[Overrides] = []
    if cfg.loss.get(COMPONENT) == "torch.nn.CrossEntropyLoss" and set(cfg.loss) <= {COMPONENT, "ignore_index"}:
        found.append((f"loss.{COMPONENT}=torchtune.modules.loss.CEWithChunkedOutputLoss",))
    found.append(("compile=True",))
    if not cfg.get("enable_activation_checkpointing"):
        found.append(EVERY_SECOND_LAYER)
    found.append(all_layers)
    if request.ranks > 1 and cfg.get("fsdp_reshard_after_forward") is False:
        found.append(("fsdp_reshard_after_forward=True",))
    if optimizer in IN_8_BITS and not lora:
        removed = (f"~optimizer.{key}" for key in cfg.optimizer if key not in ARGUMENTS_IN_8_BITS)
        found.append((f"optimizer.{COMPONENT}={IN_8_BITS[optimizer]}", *removed))
    found.append((*all_layers, "enable_activation_offloading=True"))
    if lora:
        parameters = inspect.signature(_get_component_from_path(cfg.model.get(COMPONENT))).parameters
        if "quantize_base" in parameters and not parameters["quantize_base"].default:
            found.append(("model.quantize_base=True",))
    found.append(("fsdp_cpu_offload=True",))
    with_effect = (tuple(each for each in overrides if override(cfg, (each,)) != cfg) for overrides in found)
    return [overrides for overrides in with_effect if overrides]


def _is_valid(candidate: PlanRequest) -> bool:
    try:
        settings = candidate.settings
    except AdaptiveError:
        return False
    # With optimizer states on the host, torchao would let Inductor compile kernels for the CPU.
    return not (settings.fsdp_cpu_offload and str(candidate.cfg.optimizer.get(COMPONENT)).startswith("torchao.optim."))
