"""Other settings, each rehearsed: first those that cost least time."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import NamedTuple

from omegaconf import DictConfig
from torchtune.config._utils import _get_component_from_path

from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.forecast.question import Overrides, Question, changed
from torchtune_adaptive.forecast.rehearse_recipe import Found, rehearse_recipe
from torchtune_adaptive.forecast.which_recipe import is_lora, training_of
from torchtune_adaptive.formatting import count_of, format_bytes, in_columns

ENOUGH = 2
"""Settings that fit, after which no more are tried unless all are asked for."""
MOST_MORE_RANKS = 8
"""Times as many as were asked about."""
IN_8_BITS = {"torch.optim.AdamW": "torchao.optim.AdamW8bit", "torch.optim.Adam": "torchao.optim.Adam8bit"}
TAKEN_IN_8_BITS = {COMPONENT, "lr", "betas", "eps", "weight_decay", "amsgrad"}
SMALL_LORA_RANK = 8
FEWER_ROWS: Overrides = ("use_maximum_batch_size=True",)
EVERY_SECOND_LAYER: Overrides = ("enable_activation_checkpointing=False", "ac_mode=selective", "ac_option=2")


class Tried(NamedTuple):
    overrides: Overrides
    found: Found

    def as_row(self) -> dict[str, object]:
        return {
            "overrides": " ".join(self.overrides),
            "ranks": self.found.question.ranks,
            "tokens": self.found.question.length,
            "rows": self.found.rows,
            "fits": self.found.fits,
            "reserved_bytes": self.found.most["reserved_bytes"],
        }


def advise(question: Question) -> Iterator[Tried]:
    """What fits where the config as it is does not; with `advise=True` all single changes, whether they fit or not."""
    everything, fitting = question.plan.advise is True, 0
    for candidate, overrides in _candidates(question):
        if not _starts(candidate.cfg):
            continue
        of = f"{count_of(candidate.ranks, 'rank')}, {candidate.length} tokens"
        print(f"trying {' '.join(overrides)} ({of})", file=sys.stderr, flush=True)
        try:
            tried = Tried(overrides, rehearse_recipe(candidate))
        except AdaptiveError as error:
            print(f"{' '.join(overrides)}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        if tried.found.fits or everything:
            yield tried
        fitting += tried.found.fits
        if not everything and (fitting == ENOUGH or (tried.found.fits and overrides == FEWER_ROWS)):
            return


def _candidates(question: Question) -> Iterator[tuple[Question, Overrides]]:
    """Single changes; then each with all that cost less, and more ranks."""
    fewer = [FEWER_ROWS] * ((question.batch_size or 1) > 1)
    single = [*fewer, *savers(question.cfg, question.ranks)]
    for overrides in single:
        yield question.changed(overrides), overrides
    if question.plan.advise:
        return
    together: Overrides = ()
    for overrides in single:
        if "ac_mode=selective" in overrides or overrides in fewer:  # all layers are; as many rows as are asked about
            continue
        by_key = {each.partition("=")[0]: each for each in (*together, *overrides)}  # of the same key, the last
        together = tuple(by_key.values())
        if together not in single:
            yield question.changed(together), together
    ranks = 2 * question.ranks
    while ranks <= MOST_MORE_RANKS * question.ranks:
        yield question.on(ranks), (f"world_size={ranks}",)
        ranks *= 2


def savers(cfg: DictConfig, ranks: int) -> list[Overrides]:
    """Single changes after which a step needs less memory, those first that cost the least."""
    settings = training_of(cfg).read(cfg)[0]
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
        alpha = cfg.model.lora_alpha * SMALL_LORA_RANK / cfg.model.lora_rank  # adapters that weigh as much in the sum
        found.append((f"model.lora_rank={SMALL_LORA_RANK}", f"model.lora_alpha={alpha:g}"))
    if optimizer in IN_8_BITS and not lora and not settings.fsdp_cpu_offload:
        removed = (f"~optimizer.{key}" for key in cfg.optimizer if key not in TAKEN_IN_8_BITS)
        found.append((f"optimizer.{COMPONENT}={IN_8_BITS[optimizer]}", *removed))
    if not settings.enable_activation_offloading:
        found.append((*all_layers, "enable_activation_offloading=True"))
    if lora and not cfg.model.get("quantize_base"):
        takes = inspect.signature(_get_component_from_path(cfg.model.get(COMPONENT))).parameters
        if "quantize_base" in takes and not takes["quantize_base"].default:
            found.append(("model.quantize_base=True",))
    if not settings.fsdp_cpu_offload:
        found.append(("fsdp_cpu_offload=True",))
    return [tuple(each for each in overrides if changed(cfg, (each,)) != cfg) for overrides in found]


def _starts(cfg: DictConfig) -> bool:
    """Whether the recipe takes these settings together."""
    try:
        settings = training_of(cfg).read(cfg)[0]
    except AdaptiveError:
        return False
    # torchao's states on the host would be updated by kernels that Inductor writes for CPUs
    return not (settings.fsdp_cpu_offload and str(cfg.optimizer.get(COMPONENT)).startswith("torchao.optim."))


def text(tried: list[Tried]) -> str:
    if not tried:
        return "nothing else fits, not even on 8 times as many ranks: lower sequence_length, or take a larger card"
    lines: list[tuple[str, ...]] = [("with", "", "reserved")]
    for overrides, found in tried:
        fits = "does not fit" if not found.fits else f"fits {count_of(found.rows, 'row')}" if found.rows else "fits"
        lines.append((" ".join(overrides), fits, format_bytes(found.most["reserved_bytes"])))
    return in_columns(lines)
