"""Adaptive workers as Ray actors, in SkyRL's own group of actors, with its dispatch of batches to ranks."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("skyrl")

import ray
import torch
from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
from skyrl.backends.skyrl_train.workers.worker import PPORayActorGroup
from skyrl.train.config.sft_config import SFTConfig, build_skyrl_config_for_sft
from skyrl.train.sft_trainer import SFTTrainer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.skyrl.actors import PolicyActor
from tests.skyrl.sweeps import relative
from tests.skyrl.workers import VOCABULARY, batch, config, tiny_model
from torchtune_adaptive.skyrl import adaptive

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Resources named GPU, which SkyRL requires and does not free after a test, but no GPU."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    hook = "tests.skyrl.make_importable"
    runtime = {"env_vars": environment, "worker_process_setup_hook": hook}
    ray.init(num_cpus=8, num_gpus=8, include_dashboard=False, runtime_env=runtime)
    yield
    ray.shutdown()


def run(actor: Any, path: str) -> tuple[Any, list[torch.Tensor]]:
    """Return the combined output of two actors, and the gradients of the first."""
    group = PPORayActorGroup(config("policy", path), 1, 2, actor)
    ray.get(group.async_init_model(path, 100))
    outputs = ray.get(group.async_run_ray_method("mesh", "forward_backward", data=batch(16)))
    first = ray.get(group.actor_infos[0].handle.gradients.remote())
    for each in group.actor_infos:
        ray.kill(each.handle)
    return outputs, first


def test_actors_recover_from_too_little_memory(tmp_path: Path) -> None:
    path = tiny_model(str(tmp_path))
    expected, gradients = run(PolicyActor, path)
    outputs, ours = run(adaptive(PolicyActor, memory_limit="450KiB"), path)
    assert outputs[0].metrics["oom_recoveries"] > 0
    assert relative(ours, gradients) < 1e-6
    assert [each.loss_fn_outputs for each in outputs] == [each.loss_fn_outputs for each in expected]


def finetune(trainer: type, path: str, actor: Any) -> list[float]:
    """Return the losses of two steps of SkyRL's SFTTrainer, and the recoveries."""
    sizes = ["batch_size=8", "micro_train_batch_size_per_gpu=4", "max_length=16", "placement.num_gpus_per_node=2"]
    sizes += ["remove_microbatch_padding=false", "enable_ray_gpu_monitor=false"]
    fsdp = ["mixed_precision.param_dtype=fp32", "wrap_policy.transformer_layer_cls_to_wrap=Qwen2DecoderLayer"]
    sizes += [f"fsdp_config.{each}" for each in fsdp]
    cfg = SFTConfig.from_cli_overrides(["strategy=fsdp", f"model.path={path}", "logger=console", *sizes])
    skyrl_cfg = build_skyrl_config_for_sft(cfg)
    skyrl_cfg.trainer.flash_attn = skyrl_cfg.trainer.bf16 = skyrl_cfg.trainer.gradient_checkpointing = False
    with patch.object(fsdp_worker, "PolicyWorker", actor):
        made = trainer(cfg, skyrl_cfg=skyrl_cfg)
        made.setup()
    torch.manual_seed(0)
    batch = made._build_dummy_batch()
    loss = made.train_step(batch, 0)["loss"]
    metrics = made.dispatch.forward_backward("policy", batch, loss_fn="cross_entropy").metrics
    made.shutdown()
    return [loss, metrics["loss"], metrics.get("oom_recoveries", 0)]


def test_example_finetunes_with_skyrls_sft_trainer(tmp_path: Path) -> None:
    path = tiny_model(str(tmp_path))
    words = Tokenizer(WordLevel({f"w{word}": word for word in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(path)
    example = runpy.run_path(str(ROOT / "examples" / "skyrl_sft.py"))
    *expected, _ = finetune(SFTTrainer, path, PolicyActor)
    *losses, recoveries = finetune(example["Trainer"], path, adaptive(PolicyActor, memory_limit="450KiB"))
    assert recoveries > 0
    assert losses == pytest.approx(expected, rel=1e-6)
