"""Rehearse other settings that need less memory, starting with those that cost the least time."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

from omegaconf import DictConfig
from torchtune.config._utils import _get_component_from_path

from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.forecast.rehearse_recipe import Forecast, rehearse_recipe
from torchtune_adaptive.forecast.request import Overrides, PlanRequest, is_lora, override, recipe_of
from torchtune_adaptive.formatting import count_of

ENOUGH = 2
"""Stop after this many settings that fit, unless `advise` is True."""
MOST_MORE_RANKS = 8
"""Try up to this many times the ranks."""
IN_8_BITS = {"torch.optim.AdamW": "torchao.optim.AdamW8bit", "torch.optim.Adam": "torchao.optim.Adam8bit"}
KEPT_IN_8_BITS = {COMPONENT, "lr", "betas", "eps", "weight_decay", "amsgrad"}
"""Arguments that torchao's optimizers accept."""
SMALL_LORA_RANK = 8
FEWER_ROWS: Overrides = ("use_maximum_batch_size=True",)
EVERY_SECOND_LAYER: Overrides = ("enable_activation_checkpointing=False", "ac_mode=selective", "ac_option=2")


def try_alternatives(request: PlanRequest) -> Iterator[Forecast]:
    """Yield settings that fit; with `advise=True`, all single changes, whether they fit or not."""
    everything, fitting = request.plan.advise is True, 0
    for candidate in _candidates(request):
        if not _is_valid(candidate.cfg):
            continue
        words = " ".join(candidate.changes)
        at = f"{count_of(candidate.ranks, 'rank')}, {candidate.length} tokens"
        print(f"trying {words} ({at})", file=sys.stderr, flush=True)
        try:
            forecast = rehearse_recipe(candidate)
        except AdaptiveError as error:
            print(f"{words}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        if forecast.fits or everything:
            yield forecast
        fitting += forecast.fits
        if not everything and (fitting == ENOUGH or (forecast.fits and candidate.changes == FEWER_ROWS)):
            return


def _candidates(request: PlanRequest) -> Iterator[PlanRequest]:
    """Yield single changes; then each change with all cheaper ones; then more ranks."""
    fewer = [FEWER_ROWS] * ((request.batch_size or 1) > 1)
    single = [*fewer, *changes_that_save_memory(request.cfg, request.ranks)]
    for overrides in single:
        yield request.with_overrides(overrides)
    if request.plan.advise:
        return
    together: Overrides = ()
    for overrides in single:
        # checkpointing of all layers replaces that of every second one, and fewer rows change the request
        if "ac_mode=selective" in overrides or overrides in fewer:
            continue
        together = tuple({each.partition("=")[0]: each for each in (*together, *overrides)}.values())
        if together not in single:
            yield request.with_overrides(together)
    ranks = 2 * request.ranks
    while ranks <= MOST_MORE_RANKS * request.ranks:
        yield request.with_ranks(ranks)
        ranks *= 2


def changes_that_save_memory(cfg: DictConfig, ranks: int) -> list[Overrides]:
    """Return single changes, those first that cost the least time."""
    settings = recipe_of(cfg).read(cfg)[0]
    lora, optimizer = is_lora(cfg), cfg.optimizer.get(COMPONENT)
    all_layers: Overrides = ("enable_activation_checkpointing=True", *["ac_mode=null"] * bool(cfg.get("ac_mode")))
    found: list[Overrides] = []
    if cfg.loss.get(COMPONENT) == "torch.nn.CrossEntropyLoss" and set(cfg.loss) <= {COMPONENT, "ignore_index"}:
        found.append((f"loss.{COMPONENT}=torchtune.modules.loss.CEWithChunkedOutputLoss",))
    if not settings.compile:
        found.append(("compile=True",))
    if not settings.enable_activation_checkpointing:
        found += [EVERY_SECOND_LAYER] * (settings.ac_mode != "selective")
        found.append(all_layers)
    if ranks > 1 and not settings.fsdp_reshard_after_forward:
        found.append(("fsdp_reshard_after_forward=True",))
    if lora and cfg.model.lora_rank > SMALL_LORA_RANK:
        alpha = cfg.model.lora_alpha * SMALL_LORA_RANK / cfg.model.lora_rank  # keeps the scale of the adapters
        found.append((f"model.lora_rank={SMALL_LORA_RANK}", f"model.lora_alpha={alpha:g}"))
    if optimizer in IN_8_BITS and not lora and not settings.fsdp_cpu_offload:
        removed = (f"~optimizer.{key}" for key in cfg.optimizer if key not in KEPT_IN_8_BITS)
        found.append((f"optimizer.{COMPONENT}={IN_8_BITS[optimizer]}", *removed))
    if not settings.enable_activation_offloading:
        found.append((*all_layers, "enable_activation_offloading=True"))
    if lora and not cfg.model.get("quantize_base"):
        takes = inspect.signature(_get_component_from_path(cfg.model.get(COMPONENT))).parameters
        if "quantize_base" in takes and not takes["quantize_base"].default:
            found.append(("model.quantize_base=True",))
    if not settings.fsdp_cpu_offload:
        found.append(("fsdp_cpu_offload=True",))
    return [tuple(each for each in overrides if override(cfg, (each,)) != cfg) for overrides in found]


def _is_valid(cfg: DictConfig) -> bool:
    try:
        settings = recipe_of(cfg).read(cfg)[0]
    except AdaptiveError:
        return False
    # Inductor would compile CPU kernels to update torchao's states on the host
    return not (settings.fsdp_cpu_offload and str(cfg.optimizer.get(COMPONENT)).startswith("torchao.optim."))
