"""Changes of a config that save memory, and the command that trains with them."""

from __future__ import annotations

import re
import shlex
import sys
from contextlib import closing
from itertools import accumulate

from omegaconf import OmegaConf

from torchtune_adaptive.config.components import COMPONENT
from torchtune_adaptive.config.keys import keys_of, value_at
from torchtune_adaptive.rehearse.start import ONE_MACHINE
from torchtune_adaptive.rehearse.sweep import Rehearse, SweepRow, in_parallel, ranking
from torchtune_adaptive.rehearse_recipe.request import PlanRequest, PlanSettings

IN_8_BITS = {"torch.optim.AdamW": "torchao.optim.AdamW8bit", "torch.optim.Adam": "torchao.optim.Adam8bit"}
ARGUMENTS_IN_8_BITS = {COMPONENT, "lr", "betas", "eps", "weight_decay", "amsgrad"}
"""Keys of an optimizer's section that torchao's optimizers accept."""
ENOUGH = 2
"""Stop after this many changes that fit."""
MORE_RANKS = 2, 4, 8
"""The multiples of the number of ranks that are tried."""
Words = tuple[str, ...]
"""Overrides of a config."""
SEARCH: Words = ("use_maximum_batch_size=True",)
CHUNKED_LOSS: Words = (f"loss.{COMPONENT}=torchtune.modules.loss.CEWithChunkedOutputLoss",)
EVERY_SECOND_LAYER: Words = ("ac_mode=selective", "ac_option=2")
CPU_OFFLOAD: Words = ("fsdp_cpu_offload=True",)


def changes_that_fit(request: PlanRequest, rehearse: Rehearse, row: SweepRow) -> list[SweepRow]:
    """Rehearse changes of the config in parallel until enough of them fit. Return these, the fastest first."""
    fitting: list[SweepRow] = []
    cases = {case: (case[0], row.gpu, case[1]) for case in changes_to_try(request, row.ranks)}
    with closing(in_parallel(rehearse, cases)) as results:
        for (words, ranks), found in results:
            print(f"{' '.join(words) or f'{ranks} ranks'}: {found.verdict()}", file=sys.stderr, flush=True)
            fitting += [SweepRow(row.gpu, found, label=" ".join(words))] * found.fits
            if len(fitting) >= ENOUGH:
                break
    return sorted(fitting, key=ranking)


def changes_to_try(request: PlanRequest, ranks: int) -> list[tuple[Words, int]]:
    """Return overrides and numbers of ranks: single changes, then their combinations, then more ranks."""
    single = changes_that_save_memory(request)
    # Every second layer excludes all layers. torchao's optimizers would compile kernels for a CPU.
    combinable = [each for each in single if each not in (EVERY_SECOND_LAYER, CPU_OFFLOAD)]
    combined = accumulate(combinable, lambda before, each: tuple(dict.fromkeys((*before, *each))))
    return [*((each, ranks) for each in (*single, *combined)), *(((), times * ranks) for times in MORE_RANKS)]


def changes_that_save_memory(request: PlanRequest) -> list[Words]:
    """Return single changes that save memory, beginning with those that slow training down the least.

    A change that the recipe rejects is rehearsed without an answer, so only common cases have a condition here.
    """
    cfg, lora, optimizer = request.cfg, request.recipe.is_lora, str(request.cfg.optimizer.get(COMPONENT))
    all_layers: Words = ("enable_activation_checkpointing=True", *["ac_mode=null"] * bool(cfg.get("ac_mode")))
    removed = (f"~optimizer.{key}" for key in cfg.optimizer if key not in ARGUMENTS_IN_8_BITS)
    conditions: dict[Words, bool] = {
        SEARCH: request.has_batch_size and cfg.batch_size > 1,
        CHUNKED_LOSS: cfg.loss.get(COMPONENT) == "torch.nn.CrossEntropyLoss",
        ("compile=True",): True,
        EVERY_SECOND_LAYER: not cfg.get("enable_activation_checkpointing"),
        all_layers: True,
        ("fsdp_reshard_after_forward=True",): cfg.get("fsdp_reshard_after_forward") is False,
        (f"optimizer.{COMPONENT}={IN_8_BITS.get(optimizer)}", *removed): optimizer in IN_8_BITS and not lora,
        (*all_layers, "enable_activation_offloading=True"): True,
        ("model.quantize_base=True",): lora,
        CPU_OFFLOAD: not optimizer.startswith("torchao.optim."),
    }
    found = [each for each, applies in conditions.items() if applies]
    values = ([word for word in each if not word.startswith("~")] for each in found)
    changed = [OmegaConf.merge(cfg, OmegaConf.from_dotlist(words)) for words in values]
    return [each for each, with_change in zip(found, changed, strict=True) if with_change != cfg]


def training_command(request: PlanRequest, row: SweepRow) -> str:
    """Return the command that trains with the settings of a row, and with the overrides of the request."""
    cfg = request.cfg
    own, given = keys_of(PlanSettings), (*request.overrides, *row.label.split())
    words = [word for word in given if re.split("[.=]", word)[0] not in own]
    if request.searches_rows and not cfg.get("use_maximum_batch_size"):
        words += SEARCH
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
