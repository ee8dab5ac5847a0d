"""timm: ViT-L/16, one step of AdamW."""

# bytes: 304.3e6 * (4 + 4 + 8 + 4)
import timm
import torch

model = timm.create_model("vit_large_patch16_224").cuda()
optimizer = torch.optim.AdamW(model.parameters())
loss = torch.nn.functional.cross_entropy(model(torch.rand(1, 3, 224, 224).cuda()), torch.tensor([1]).cuda())
loss.backward()
optimizer.step()
