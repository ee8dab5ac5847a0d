"""Searches of SkyRL's workers with a model of 1.5 B parameters, as rank 0 of 4, on a null device of 24 GB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from gpu_rehearsal.device import environment

RANKS, CARD = 4, 24 * 10**9
ROWS = 32
LONGEST = {"max_prompt_length": 512, "max_generate_length": 1024}
QWEN = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
"""The sizes of Qwen2.5-1.5B."""


def on_null_device(kind: str) -> dict[str, Any]:
    """Run `measured` in a process on a null device, which prints the searches."""
    command = [sys.executable, "-m", "tests.skyrl.full_size", kind]
    variables = {**os.environ, **environment(memory=CARD)}
    run = subprocess.run(
        command,
        env=variables,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=500,
    )
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@contextmanager
def worker_of(kind: str) -> Iterator[Any]:
    """Yield a worker that SkyRL has initialized, except that its weights have no values. The other ranks are fake."""
    import torch.distributed as dist
    from skyrl.backends.skyrl_train.distributed import fsdp_strategy
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import Qwen2Config

    from tests.skyrl.workers import KINDS, config
    from torchtune_adaptive.engine import ranks, snapshot
    from torchtune_adaptive.skyrl import adaptive

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    replacements = {
        (ranks.Agreement, "gather"): lambda _, row: [tuple(row)] * RANKS,
        (ranks, "new_gloo_group"): lambda *_, **__: None,
        (snapshot, "checksums_of"): lambda *_, **__: [],
        (fsdp_worker, "should_use_meta_init"): lambda **_: True,
        (fsdp_strategy, "fsdp2_load_full_state_dict"): lambda module, *_: module.to_empty(device="cuda"),
    }
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        for (owner, name), replacement in replacements.items():
            stack.enter_context(mock.patch.object(owner, name, replacement))
        Qwen2Config(**QWEN, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
        settings = config(kind, folder, ["trainer.gradient_checkpointing=true", "trainer.algorithm.use_kl_loss=true"])
        for role in (settings.policy, settings.critic):
            role.fsdp_config.mixed_precision = None  # SkyRL's default: parameters in bf16
        places = {"world_size": RANKS, "rank": 0, "local_rank": 0, "sequence_parallel_size": 1}
        made = adaptive(KINDS[kind], use_maximum_batch_size=True, **LONGEST)(
            cfg=settings, master_addr="127.0.0.1", master_port=1, **places
        )
        made.init_worker_process_group()
        made.init_model(folder, *([] if kind == "reference" else [100]))
        yield made


def measured(kind: str) -> dict[str, Any]:
    """Run all passes of a worker, with weights that leave the device in between. Return what was measured."""
    import torch
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch

    from tests.fault_injection import FaultInjector
    from tests.skyrl.workers import batch
    from torchtune_adaptive.skyrl.passes import longest_row

    found: dict[str, Any] = {"seconds": {}, "in_memory": [], "rows": {}}
    with worker_of(kind) as made:

        def note_memory() -> None:
            found["in_memory"].append(torch.cuda.memory_allocated())

        note_memory()
        one = longest_row(batch(1), made.arguments, padded=True)
        data = TrainingInputBatch({name: each.repeat(ROWS, 1) for name, each in one.items()})
        data.metadata = one.metadata
        for method in ("forward", "forward_backward") if kind != "reference" else ("forward",):
            began = time.perf_counter()
            getattr(made, method)(batch(ROWS))  # searches
            found["seconds"][method] = time.perf_counter() - began
            made.model.zero_grad()
            getattr(made, method)(data)
            runner = made.passes.runners[method]
            found["rows"][method] = runner.limit.size
            assert runner.recoveries == 0
        found["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
        made.model.zero_grad()
        made.offload_to_cpu()
        note_memory()
        made.backload_to_gpu()
        note_memory()
        with FaultInjector(runner).fail_at(rank=0, step=made.passes.calls + 1, operation=300):
            getattr(made, method)(data)
        found["recoveries"] = runner.recoveries
    return found


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1])))
