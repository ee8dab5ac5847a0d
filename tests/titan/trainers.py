"""Build torchtitan's own Trainer and an AdaptiveTrainer on CPUs, with tiny models, and run their steps."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan import trainer as titan
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.models.common import attention
from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel
from torchtitan.tools import utils

from torchtune_adaptive.titan import adaptive

VOCABULARY, TOKENS = 2048, 32
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama3.model_registry("debugmodel"),
    "qwen": lambda: qwen3.model_registry("debugmodel"),
    "qwen moe": lambda: qwen3.model_registry("debugmodel_moe"),
    "deepseek": lambda: deepseek_v3.model_registry("debugmodel"),
}


class RandomTokens(BaseDataLoader):
    """Endless batches of random tokens, a fifth of which are not targets."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self._rank, self._shape, self.taken = dp_rank, (local_batch_size, seq_len + 1), 0
        self.other_input = ""

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            random = torch.Generator().manual_seed(1000 * self.taken + self._rank)
            self.taken += 1
            tokens = torch.randint(0, VOCABULARY, self._shape, generator=random)
            labels = tokens[:, 1:].clone()
            labels[torch.rand(labels.shape, generator=random) < 0.2] = IGNORE_INDEX
            inputs = {"input": tokens[:, :-1], "positions": torch.arange(labels.shape[1]).expand_as(labels)}
            yield (inputs | {self.other_input: torch.zeros(3)} if self.other_input else inputs), labels

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


@dataclasses.dataclass
class Tokenizer:
    """The part of a tokenizer that a Trainer reads, and of its config."""

    eos_id: int = 0

    def build(self, **_: Any) -> Tokenizer:
        return self

    def get_vocab_size(self) -> int:
        return VOCABULARY


def replace_flex_attention() -> None:
    """Its backward needs a GPU that computes."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **_: Any) -> tuple[Tensor, None]:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        ), None

    def create_mask(*args: Any, **kwargs: Any) -> Any:
        try:
            return attention.create_block_mask(*args, **kwargs)
        except IndexError as error:  # torch raises it for any error in `expand`, which needs no memory
            raise torch.OutOfMemoryError("injected") from error

    attention.FlexAttention.compiled_flex_attn = staticmethod(attend)
    attention._compiled_create_block_mask = create_mask


def use_cpus(*, compiles: bool = False) -> None:
    """Replace what a CPU does not have. Functions are only compiled if `compiles`."""
    if not compiles:
        torch.compiler.set_stance("force_eager")
    replace_flex_attention()
    Tensor.bfloat16 = lambda tensor: tensor  # type: ignore[method-assign, assignment]  # experts would round otherwise
    properties = type("Properties", (), {"total_memory": 2**34, "name": "cpu"})
    replaced = {"get_device_name": "cpu", "get_device_properties": properties, "memory_stats": {}, "device_count": 1}
    for name in ("reset_peak_memory_stats", "empty_cache"):
        replaced[name] = None
    for name, value in replaced.items():
        setattr(utils.device_module, name, lambda *_, value=value: value)
    Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign, assignment]
    titan.dist_utils.set_pg_timeouts = lambda **_: None
    dist.all_to_all = partial(_all_to_all, dist.all_to_all)
    create, created = titan.Trainer.init_distributed, dict[str, Any]()

    def shared(trainer: Any) -> Any:
        """DTensor caches meshes, so trainers of the same parallelism must share theirs."""
        name = repr(trainer.config.parallelism)
        created[name] = created.get(name) or create(trainer)
        return created[name]

    titan.Trainer.init_distributed = shared
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does when it creates the process group
    logging.disable(logging.WARNING)


def _all_to_all(exchange: Any, outputs: list[Tensor], inputs: list[Tensor], group: Any = None) -> None:
    """Collective: exchange tensors of different sizes, which gloo refuses in lists. Integers have equal sizes."""
    if not inputs[0].is_floating_point():
        exchange(outputs, inputs, group=group)
        return
    received = torch.cat(outputs)
    sizes = [[len(each) for each in tensors] for tensors in (outputs, inputs)]
    dist.all_to_all_single(received, torch.cat(inputs), *sizes, group=group)
    for output, part in zip(outputs, received.split(sizes[0]), strict=True):
        output.copy_(part)


def config(
    model: str = "llama", *, rows: int = 4, batches: int = 1, chunked: bool = True, dp: int = 0, **settings: Any
) -> Any:
    """Return torchtitan's config: `rows` and `batches` of each rank in a step, `dp` ranks with own samples. `settings`
    have the names of torchtitan's flags, with a double underscore instead of the dot."""
    spec = MODELS[model]()
    spec.model.layers = spec.model.layers[:2]
    loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    made = llama3_debugmodel()
    made.model_spec, made.dataloader, made.tokenizer = spec, RandomTokens.Config(), Tokenizer()
    made.hf_assets_path = "."
    made.loss = ChunkedLossWrapper.Config(num_chunks=4, loss_fn=loss) if chunked else loss
    made.training.local_batch_size, made.training.seq_len = rows, TOKENS
    made.training.global_batch_size = rows * batches * (dp or dist.get_world_size())
    made.training.mixed_precision_param = "float32"
    made.training.disable_cuda_graphs = True
    made.activation_checkpoint, made.debug.seed = None, 42
    for name, value in settings.items():
        *path, last = name.split("__")
        owner = made
        for each in path:
            owner = getattr(owner, each)
        setattr(owner, last, value)
    return made


def llama3_8b_on_random_tokens() -> Any:
    made = llama3_8b()
    made.dataloader, made.tokenizer, made.training.disable_cuda_graphs = RandomTokens.Config(), Tokenizer(), True
    made.profiler.enable_profiling = False
    return made


def build(made: Any) -> Any:
    """Collective: build the trainer of a config."""
    trainer = dataclasses.replace(made).build()
    for model in trainer.model_parts:
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):  # gloo has no scaled sums
                module.set_force_sum_reduction_for_comms(True)
    trainer.metrics_processor.gpu_peak_flops = 1.0
    return trainer


def pair(*args: Any, arguments: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, Any]:
    """Collective: return torchtitan's trainer and an adaptive one, from the same config."""
    made = build(config(*args, **settings)), build(adaptive(config(*args, **settings), **(arguments or {})))
    gc.collect()
    gc.freeze()  # each recovery collects garbage
    return made


def step(trainer: Any, data: int | None = None, *, update: bool = True) -> list[Tensor]:
    """Collective: run a training step, and return this rank's part of each gradient before clipping. `data` is the
    number of the batch, by default the next one."""
    gradients: list[Tensor] = []
    clip = titan.dist_utils.clip_grad_norm_

    def record(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        found = [each.grad for each in parameters if each.grad is not None]
        gradients.extend(getattr(each, "_local_tensor", each).clone() for each in found)
        return clip(parameters, *args, **kwargs)

    if data is not None:
        trainer.dataloader.taken = data
    titan.dist_utils.clip_grad_norm_ = record
    if not update:
        trainer.optimizers.step = trainer.lr_schedulers.step = lambda *_: None
    trainer.step += 1
    try:
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
    finally:
        titan.dist_utils.clip_grad_norm_ = clip
        if not update:
            del trainer.optimizers.step, trainer.lr_schedulers.step
    return gradients


def relative(ours: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference, relative to the norm of the tensor."""
    assert len(ours) == len(expected)
    pairs = zip(ours, expected, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in pairs)


def same(ours: list[Tensor], expected: list[Tensor]) -> bool:
    return len(ours) == len(expected) and all(map(torch.equal, ours, expected))
