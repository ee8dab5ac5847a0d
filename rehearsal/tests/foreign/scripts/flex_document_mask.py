"""Flex attention, compiled, with a document mask whose ids come from the host."""

# bytes: 3 * 4 * 16 * 4096 * 64 * 2
# at most: 4.5
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

ids = torch.arange(4096).div(512, rounding_mode="floor").cuda()
mask = create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, 4096, 4096, device="cuda")
attend = torch.compile(flex_attention)
weight = torch.nn.Parameter(torch.rand(3, 4, 16, 4096, 64, device="cuda", dtype=torch.bfloat16))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    attend(*weight, block_mask=mask).sum().backward()
    optimizer.step()
