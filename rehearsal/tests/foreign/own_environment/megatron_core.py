"""megatron-core: a GPT of 936 million parameters with its parallelisms, or a mixture of experts."""

# command: -- torchrun --nproc_per_node 2 SCRIPT --tp 2 --recompute
# bytes: 936e6 / 2 * 18
# command: -- torchrun --nproc_per_node 8 SCRIPT --tp 2 --dist-opt --sp
# bytes: 936e6 / 2 * (2 + 4 + 12 / 4)
# at most: 1.6
# command: -- torchrun --nproc_per_node 2 SCRIPT --pp 2 --vpp=2
# bytes: 936e6 / 2 * 18
# at most: 1.6
# command: -- torchrun --nproc_per_node 8 SCRIPT --ep 4 --experts=8
# bytes: (131e6 + 16 * 4 * 2048**2) * 18 + 16 * 2 * 8 * 2048**2 * 18
# at most: 1.4
import argparse
import os

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

moe_utils.te_general_gemm = None  # version 0.16.1 does not define it without Transformer Engine

TOKENS, VOCABULARY = 1024, 32_000
parser = argparse.ArgumentParser()
for size in "tp", "pp", "ep", "vpp", "experts":
    parser.add_argument(f"--{size}", type=int, default=None if size in ("vpp", "experts") else 1)
for choice in "--sp", "--dist-opt", "--recompute":
    parser.add_argument(choice, action="store_true")
chosen = parser.parse_args()

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel(
    chosen.tp, chosen.pp, expert_model_parallel_size=chosen.ep, virtual_pipeline_model_parallel_size=chosen.vpp
)
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=16, hidden_size=2048, num_attention_heads=16, bf16=True, params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16, add_bias_linear=False, tensor_model_parallel_size=chosen.tp,
    pipeline_model_parallel_size=chosen.pp, virtual_pipeline_model_parallel_size=chosen.vpp,
    expert_model_parallel_size=chosen.ep, num_moe_experts=chosen.experts, sequence_parallel=chosen.sp,
    moe_token_dispatcher_type="alltoall", recompute_granularity="full" if chosen.recompute else None,
    recompute_method="uniform" if chosen.recompute else None, recompute_num_layers=1 if chosen.recompute else None,
    finalize_model_grads_func=finalize_model_grads,
)  # fmt: skip


def stage(at: int | None) -> GPTModel:
    """Return the layers of this rank, or of one of its virtual stages."""
    return GPTModel(
        config, get_gpt_layer_local_spec(chosen.experts, False, normalization="LayerNorm"), VOCABULARY, TOKENS,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=at),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=at), vp_stage=at,
    ).cuda().bfloat16()  # fmt: skip


reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=chosen.dist_opt)
stages = [stage(at if chosen.vpp else None) for at in range(chosen.vpp or 1)]
models = [DistributedDataParallel(config, reduction, model, disable_bucketing=i > 0) for i, model in enumerate(stages)]
optimizer = get_megatron_optimizer(
    OptimizerConfig(lr=1e-4, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=chosen.dist_opt), models
)


def forward_step(_, model):
    """Return the loss of each token, and a function that reduces it."""
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), device="cuda")
    places = torch.arange(TOKENS, device="cuda").expand(1, -1)
    mask = torch.ones(1, 1, TOKENS, TOKENS, device="cuda").tril() < 0.5
    return model(tokens, places, mask, labels=tokens), lambda losses: (losses.float().mean(), {})


for _ in range(3):
    for model in models:
        model.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=[None] * len(models) if chosen.vpp else None,
        model=models if chosen.vpp else models[0], num_microbatches=2 * chosen.pp, seq_length=TOKENS,
        micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    optimizer.step()
