"""FSDP1: a ViT-H-sized encoder, wrapped by layer, with mixed precision."""

# command: -- torchrun --nproc_per_node 8 SCRIPT
# bytes: 629.7e6 * (4 + 4 + 8 + 4) / 8
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

torch.distributed.init_process_group("nccl")
torch.cuda.set_device(torch.distributed.get_rank())
layer = torch.nn.TransformerEncoderLayer(1280, 16, 5120, batch_first=True, norm_first=True)
model = FullyShardedDataParallel(
    torch.nn.TransformerEncoder(layer, 32, enable_nested_tensor=False),
    auto_wrap_policy=ModuleWrapPolicy({torch.nn.TransformerEncoderLayer}),
    mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16),
    device_id=torch.cuda.current_device(),
)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.rand(1, 64, 1280, device="cuda")).sum().backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
