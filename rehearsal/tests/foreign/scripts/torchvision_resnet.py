"""torchvision: ResNet-50 with SGD and momentum, channels last, autocast and a gradient scaler."""

# bytes: 25.56e6 * (4 + 4 + 4)
# at most: 1.35
# note: cuDNN
import torch
import torchvision

model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler()
for _ in range(3):
    images = torch.rand(2, 3, 224, 224).cuda(non_blocking=True).to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.float16):
        loss = torch.nn.functional.cross_entropy(model(images), torch.tensor([1, 2]).cuda())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
