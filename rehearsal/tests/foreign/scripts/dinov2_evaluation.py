"""DINOv2 large on images of 518 pixels; each epoch ends with an evaluation that keeps the best weights."""

# bytes: 306e6 * (4 + 4 + 8) + 8 * 24 * 1370 * 1024 * 38
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForImageClassification

large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 518}
model = AutoModelForImageClassification.from_config(AutoConfig.for_model("dinov2", num_labels=10, **large)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.rand(16, 3, 518, 518), torch.randint(0, 10, (16,)))
loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True, pin_memory=True)
best = 0.0
for _ in range(2):
    model.train()
    for images, labels in loader:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(images.cuda(non_blocking=True), labels=labels.cuda(non_blocking=True)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for images, labels in loader:
            predicted = model(images.cuda()).logits.argmax(-1).cpu()
            correct += (predicted == labels).sum().item()
            total += len(labels)
    if correct / total > best:
        best = correct / total
        torch.save(model.state_dict(), "best.pt")
