"""Build SkyRL's own workers on CPUs, with tiny models, and run their passes with and without recovery."""

from __future__ import annotations

import gc
import logging
import tempfile
import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from skyrl.backends.skyrl_train.distributed import fsdp_utils
from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank
from skyrl.backends.skyrl_train.training_batch import TensorList, TrainingInputBatch
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import (
    FSDPCriticWorkerBase,
    FSDPPolicyWorkerBase,
    FSDPRefWorkerBase,
)
from skyrl.train.config import SkyRLTrainConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration

KINDS: dict[str, type] = {
    "policy": FSDPPolicyWorkerBase,
    "critic": FSDPCriticWorkerBase,
    "reference": FSDPRefWorkerBase,
}
PROMPT, ANSWER = 6, 10
VOCABULARY = 128
IMAGE, PATCH = 120, 4
"""The token of a part of an image, above all tokens of text, and the pixels of a patch."""


def use_cpus() -> None:
    """Let SkyRL's code, which names CUDA, run on a CPU."""

    def on_cpu(kind: str, *args: Any, **kwargs: Any) -> Any:
        return init_device_mesh("cpu", *args, **kwargs)

    fsdp_utils.init_device_mesh = on_cpu
    for name, value in {"current_device": "cpu", "set_device": None, "synchronize": None, "device_count": 1}.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    Tensor.cuda = Tensor.cpu  # type: ignore[method-assign, assignment]
    empty = torch.empty
    logging.disable(logging.WARNING)
    gc.collect()
    gc.freeze()  # each recovery collects garbage
    fsdp_utils.torch = types.SimpleNamespace(**vars(torch))
    fsdp_utils.torch.empty = lambda *args, **kwargs: empty(*args, **{**kwargs, "device": "cpu"})


def tiny_model(folder: str, *, images: bool = False) -> str:
    """Save a model, which takes images if `images`, and return the folder."""
    torch.manual_seed(0)
    if images:
        rope = {"rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
        text = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope}
        vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": PATCH, "mlp_ratio": 2}
        ids = {"image_token_id": IMAGE, "vision_start_token_id": IMAGE + 1, "vision_end_token_id": IMAGE + 2}
        ids |= {"video_token_id": IMAGE + 3}
        made = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
        Qwen2VLForConditionalGeneration(made).save_pretrained(folder)
        return folder
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=False)).save_pretrained(folder)
    return folder


def config(kind: str, path: str, overrides: Sequence[str] = (), layer: str = "Qwen2DecoderLayer") -> Any:
    """Return the part of SkyRL's config that workers get."""
    role = {"reference": "ref"}.get(kind, kind)
    made = SkyRLTrainConfig.from_cli_overrides(
        [
            *(f"trainer.{each}.model.path={path}" for each in ("policy", "critic", "ref")),
            *(f"trainer.{each}.fsdp_config.mixed_precision.param_dtype=fp32" for each in ("policy", "critic")),
            "trainer.flash_attn=false",
            "trainer.remove_microbatch_padding=false",
            "trainer.bf16=false",
            "trainer.micro_train_batch_size_per_gpu=4",
            "trainer.micro_forward_batch_size_per_gpu=4",
            "trainer.gradient_checkpointing=false",
            f"trainer.{role}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap={layer}",
            *overrides,
        ]
    ).trainer
    made.algorithm.temperature = 1.0
    return made


def join_ranks(made: Any) -> None:
    """Set up a worker's groups of ranks on CPUs."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    made.device_mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "sp"))
    made.mesh_rank = MeshRank(dp=rank, sp=0, tp=0, pp=0, world_size=ranks, dp_size=ranks, pp_size=1)


def worker(kind: str, base: type | None = None, overrides: Sequence[str] = (), *, images: bool = False) -> Any:
    """Collective: return a worker with a tiny model. It is initialized as by SkyRL, except for its groups of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [tiny_model(folder, images=images)]  # transformers saves it on rank 0
        dist.broadcast_object_list(paths)
        made = (base or KINDS[kind])(
            cfg=config(kind, paths[0], overrides, "Qwen2VLDecoderLayer" if images else "Qwen2DecoderLayer"),
            world_size=dist.get_world_size(),
            rank=dist.get_rank(),
            local_rank=dist.get_rank(),
            master_addr="127.0.0.1",
            master_port=1,
            sequence_parallel_size=1,
        )
        join_ranks(made)
        made.init_model(paths[0], *([] if kind == "reference" else [100]))
        dist.barrier()
    return made


def batch(rows: int = 8, seed: int = 7, *, images: bool = False) -> Any:
    """Return a batch of this rank, as SkyRL's trainer makes it: prompts padded on the left, answers on the right.

    The seed is that of the lengths.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    random, lengths = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(seed)
    sequences = torch.randint(3, IMAGE, (rows, PROMPT + ANSWER), generator=random)
    prompts = torch.randint(2, PROMPT + 1, (rows,), generator=lengths)
    answers = torch.randint(3, ANSWER + 1, (rows,), generator=lengths)
    prompt_mask = (torch.arange(PROMPT)[None] >= PROMPT - prompts[:, None]).long()
    mask = (torch.arange(ANSWER)[None] < answers[:, None]).long()

    def noise(scale: float, mean: float = 0.0) -> Tensor:
        return torch.randn(rows, ANSWER, generator=random) * scale + mean

    data = TrainingInputBatch(
        {
            "sequences": sequences,
            "attention_mask": torch.cat([prompt_mask, mask], 1),
            "loss_mask": mask,
            "response_mask": mask,
            "advantages": noise(1) * mask / mask.sum(),
            "action_log_probs": noise(0.1, -4.8),
            "base_action_log_probs": noise(0.1, -4.8),
            "rollout_logprobs": noise(0.1, -4.8),
            "values": noise(1),
            "returns": noise(1),
        }
    )
    data.metadata = {"response_length": ANSWER}
    if images:  # each prompt ends with an image of 2 x 4 patches, which are two tokens
        sequences[:, PROMPT - 3 : PROMPT] = torch.tensor([IMAGE + 1, IMAGE, IMAGE])
        data["attention_mask"][:, PROMPT - 3 : PROMPT] = 1
        pixels = torch.randn(rows, 8, 2 * 3 * PATCH**2, generator=random)
        data["pixel_values"] = TensorList(list(pixels))
        data["image_grid_thw"] = TensorList([torch.tensor([[1, 2, 4]])] * rows)
    return data


def gradients(made: Any) -> list[Tensor]:
    """Return this rank's part of each gradient."""
    grads = [each.grad for each in made.model.parameters() if each.grad is not None]
    return [getattr(each, "_local_tensor", each).clone() for each in grads]
