"""torchtitan's Llama (TP 2 x FSDP 2) and Qwen3 mixture of experts (EP 2) survive running out of memory. No GPU:

torchrun --nproc_per_node 4 examples/torchtitan_models.py llama
torchrun --nproc_per_node 2 examples/torchtitan_models.py moe

Models, meshes, parallelize functions and activation checkpointing are torchtitan's (0.3.0), with small sizes. The
training loop is not torchtitan's. The loss is a sum over tokens, and the gradients are divided by the tokens of all
ranks before the update. To use torchtitan's own Trainer, see docs/torchtitan.md.
"""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from torchtune_adaptive import MemoryMeter, RowLimit, SampleKind, StepRunner, Totals

parallel_dims.device_type = "cpu"  # without a GPU, torchtitan assumes CUDA
VOCABULARY, DIM, LAYERS = 256, 64, 2


def llama_config():
    rope = ComplexRoPE.Config(dim=DIM // 4, max_seq_len=512, theta=500000, scaling="llama")
    layers = llama3._build_llama3_layers(
        n_layers=LAYERS, dim=DIM, n_heads=4, n_kv_heads=2, hidden_dim=96, rope=rope, attn_backend="varlen"
    )
    return llama3.Llama3Model.Config(**ends(layers))


def mixture_config():
    rope = CosSinRoPE.Config(dim=DIM // 4, max_seq_len=512, theta=1000000.0)
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=LAYERS, dim=DIM, n_heads=4, n_kv_heads=2, head_dim=DIM // 4, moe_hidden_dim=32, num_experts=8, top_k=2,
        attn_backend="varlen", moe_comm_backend="standard", rope=rope,
    )  # fmt: skip
    return qwen3.Qwen3Model.Config(**ends(layers))


def ends(layers):
    """Return the arguments of a model: its layers, and what comes before and after them."""
    for layer in layers:  # torchtitan's other kinds of attention need a GPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    weights = {"weight": lambda weight: nn.init.normal_(weight, std=0.05)}
    return {
        "dim": DIM,
        "vocab_size": VOCABULARY,
        "layers": layers,
        "tok_embeddings": Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=weights),
        "norm": RMSNorm.Config(normalized_shape=DIM, param_init={"weight": nn.init.ones_}),
        "lm_head": Linear.Config(in_features=DIM, out_features=VOCABULARY, param_init=weights),
    }


def build(kind, checkpointing=None):
    """Collective: build a model as torchtitan's trainer does."""
    degrees = {"tensor_parallel_degree": 2} if kind == "llama" else {"expert_parallel_degree": 2}
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **degrees)
    set_spmd_backend(parallelism.spmd_backend)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    if kind == "llama":
        config, parallelize = llama_config(), llama3.parallelize_llama
        set_llama3_sharding_config(config, enable_sp=True)
    else:
        config, parallelize = mixture_config(), qwen3.parallelize_qwen3
        set_qwen3_sharding_config(config, enable_sp=True, enable_ep=True)
    with torch.device("meta"):
        model = config.build()
    model = parallelize(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=checkpointing,
        dump_folder="",
    )
    for module in model.modules():  # torchtitan uses a scaled sum, which NCCL supports but gloo does not
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    model.init_states()
    return model


def forward_backward(model, samples):
    """One microbatch. The loss is a sum, so that a sample counts the same however the step is split."""
    tokens = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    logits, labels = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    with loss_parallel() if isinstance(logits, DTensor) else nullcontext():
        loss = F.cross_entropy(logits, labels, ignore_index=0, reduction="sum")
        loss.backward()
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    return Totals(loss.detach(), int((labels != 0).sum()))


def main(kind):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = build(kind, checkpointing=FullAC.Config() if kind == "llama" else None)  # experts: see docs/torchtitan.md
    shared_by = 2 if kind == "llama" else 1  # ranks of a tensor-parallel group train on the same samples
    draw = torch.Generator().manual_seed(rank // shared_by)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=False)
    runner = StepRunner(
        model,
        lambda samples: forward_backward(model, samples),
        limit=RowLimit(8),
        kind=SampleKind(length_of=len, filler=lambda sample: sample[:3]),
    )
    # Simulates the memory of a GPU: the last rank has too little for 8 samples at once. The mixture has no limit: it is
    # so small that completing the collectives of a failed pass needs as much memory as the pass.
    with MemoryMeter(cap_bytes=2_000_000 if rank == ranks - 1 and kind == "llama" else None):
        for step in range(1, 7):
            lengths = torch.randint(8, 64, (8,), generator=draw).tolist()
            result = runner.run([torch.arange(1, length) for length in lengths], step=step)
            # torchtitan lets FSDP add gradients, not average them. Ranks that share samples each count their tokens.
            for parameter in model.parameters():
                parameter.grad.mul_(shared_by / result.target_tokens)
            with runner.committing("optimizer.step", last_checkpoint=None):
                optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                loss = result.loss_sum.item() / result.target_tokens
                print(f"step {step}: loss {loss:.4f}, at most {runner.limit.rows} rows, {runner.recoveries} recoveries")
    runner.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
