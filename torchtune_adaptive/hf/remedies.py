"""Remedies expressed as arguments of AdaptiveMixin and Trainer."""

from __future__ import annotations

from collections.abc import Mapping

from torchtune_adaptive.errors import Remedy

REMEDIES_AS_ARGUMENTS: Mapping[Remedy, str] = {
    Remedy.CHECKPOINT_ACTIVATIONS: "set gradient_checkpointing=True",
    Remedy.MORE_RANKS: "shard the model over more ranks with FSDP2",
    Remedy.LARGER_BUDGET: "raise memory_limit",
    Remedy.SMALLER_LIMIT: "lower per_device_train_batch_size",
    Remedy.NO_RECOVERY: "set recover_from_oom=False",
    Remedy.RECOVERY: "set recover_from_oom=True",
    Remedy.FEWER_ROWS: "set use_maximum_batch_size=False",
    Remedy.ROOM_FOR_NCCL: "if CUDA was out of memory, leave more memory to NCCL: set memory_limit, for example to 0.9",
    Remedy.CAP_MEMORY: "set memory_limit, for example to 8GiB",
}
"""The text of each remedy, expressed as a value of TrainingArguments or AdaptiveArguments."""
