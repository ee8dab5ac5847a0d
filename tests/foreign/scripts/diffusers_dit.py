"""diffusers: a DiT transformer in bf16 autocast with gradient checkpointing."""

# bytes: 749.8e6 * (4 + 4 + 8 + 4)
import torch
from diffusers import DiTTransformer2DModel

model = DiTTransformer2DModel(num_attention_heads=16, attention_head_dim=72, num_layers=28, sample_size=32).cuda()
model.enable_gradient_checkpointing()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    images = torch.rand(1, 4, 32, 32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        predicted = model(images, torch.tensor([3], device="cuda"), torch.tensor([7], device="cuda")).sample
        loss = predicted[:, :4].float().sub(images).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
