"""The texts of remedies in errors, expressed as config keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchtune_adaptive.errors import AdaptiveError, Remedy, without_backward

if TYPE_CHECKING:
    from omegaconf import DictConfig

KEYS: Mapping[Remedy, str] = {
    Remedy.SHORTER_SAMPLES: "lower tokenizer.max_seq_len (and adaptive.sequence_length if set)",
    Remedy.CHECKPOINT_ACTIVATIONS: "set enable_activation_checkpointing: True",
    Remedy.MORE_RANKS: "train on more ranks",
    Remedy.LARGER_BUDGET: "raise adaptive.memory_limit if it is set",
    Remedy.SMALLER_LIMIT: "lower batch_size",
    Remedy.LESS_STATE: Remedy.LESS_STATE.value,
    Remedy.NO_RECOVERY: "set adaptive.recover_from_oom: False",
    Remedy.RECOVERY: "remove adaptive.recover_from_oom: False",
    Remedy.FEWER_ROWS: "lower adaptive.max_batch_size",
    Remedy.MEASURING_STRATEGY: "set adaptive.search to linear",
    Remedy.ROOM_FOR_NCCL: (
        "if CUDA was out of memory, leave more memory to NCCL: lower adaptive.memory_limit (for example, to 0.9) or "
        "batch_size"
    ),
    Remedy.CAP_MEMORY: "set adaptive.memory_limit, for example to 8GiB",
}

KEYS_IN_PPO: Mapping[Remedy, str] = {
    **KEYS,
    Remedy.SHORTER_SAMPLES: "lower max_generated_tokens or tokenizer.max_seq_len",
    Remedy.SMALLER_LIMIT: "lower forward_batch_size or raise gradient_accumulation_steps",
}
"""Remedies in PPO, where `batch_size` is not the size of a microbatch."""


@contextmanager
def without_active_remedies(cfg: DictConfig) -> Iterator[None]:
    """Remove a remedy from errors if the config has already applied it."""
    try:
        yield
    except AdaptiveError as error:
        if cfg.get("enable_activation_checkpointing") is True:
            error.remedies = without_backward(error.remedies)
        raise
