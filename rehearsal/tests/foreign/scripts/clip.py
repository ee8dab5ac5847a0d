"""CLIP's contrastive loss, gathered over 8 ranks."""

# command: -- torchrun --nproc_per_node 8 SCRIPT
# bytes: 151.3e6 * (4 + 4 + 8 + 4 + 4)
import torch
import torch.distributed.nn.functional as collective
from transformers import CLIPConfig, CLIPModel

torch.distributed.init_process_group("nccl")
torch.cuda.set_device(torch.distributed.get_rank())
model = torch.nn.parallel.DistributedDataParallel(CLIPModel(CLIPConfig()).cuda(), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    found = model(input_ids=torch.ones(4, 16, dtype=torch.long).cuda(), pixel_values=torch.rand(4, 3, 224, 224).cuda())
    images = torch.cat(collective.all_gather(found.image_embeds))
    texts = torch.cat(collective.all_gather(found.text_embeds))
    torch.nn.functional.cross_entropy(images @ texts.T, torch.arange(32).cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
