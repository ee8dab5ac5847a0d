"""What a rehearsal replaces in Megatron and in vLLM.

Megatron: stand-ins for Apex's kernels, if Apex is not installed. They take as much memory as the kernels. Without them,
Megatron has no fused softmax, and its LayerNorm has no sequence parallelism.

vLLM: the number of tokens that a step of generation samples, which a kernel computes, and the cache of its compiler.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch


class FusedLayerNormAffineFunction:
    """LayerNorm with weights. Megatron looks at the arguments of `forward`, and calls `apply`."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, weight: Any, bias: Any, shape: Any, eps: float) -> torch.Tensor:
        """Return the normalized tensor."""
        return torch.nn.functional.layer_norm(x, tuple(shape), weight, bias, eps)

    @classmethod
    def apply(cls, *args: Any) -> torch.Tensor:
        """Call `forward`, which needs no context, because autograd knows torch's function."""
        return cls.forward(None, *args)


def _softmax(scores: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.softmax(scores, -1)


def _gradients(gradients: torch.Tensor, softmax: torch.Tensor, *_: Any) -> torch.Tensor:
    return gradients.mul_(softmax)  # Apex's kernel overwrites its argument, too


def _rows_per_block(_: int, columns: int, *__: int) -> int:
    return 4 if columns > 128 else 4 * 32 // min(32, max(1, columns)) * 2


_MODULES: dict[str, dict[str, Any]] = {
    **{
        name: {"forward": _softmax, "backward": _gradients, "get_batch_per_block": _rows_per_block}
        for name in ("scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda", "scaled_softmax_cuda")
    },
    "apex": {"__path__": []},
    "apex.normalization": {"__path__": []},
    "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": FusedLayerNormAffineFunction},
}


def stand_in_for_apex(_: ModuleType) -> None:
    """Let imports of these modules succeed, unless Apex is installed."""
    if find_spec("apex") is None:
        for name, content in _MODULES.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(content)
        print("rehearse: Apex is not installed; its softmax and its LayerNorm are replaced", file=sys.stderr)


def compile_each_layer_once(_: ModuleType) -> None:
    """Let vLLM use Inductor's cache, which it needs. The rehearsal deletes it, because no kernel was tried."""
    torch.compiler.config.force_disable_caches = False


def sample_one_token(outputs: ModuleType) -> None:
    """Let each step of vLLM sample one token per request, so that a request ends after `max_tokens`."""
    get_output = outputs.AsyncOutput.get_output

    def get(self: Any) -> Any:
        self.copy_event.synchronize()
        self.num_sampled_tokens_np.fill(1)
        return get_output(self)

    outputs.AsyncOutput.get_output = get
