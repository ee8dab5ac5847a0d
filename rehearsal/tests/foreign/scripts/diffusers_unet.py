"""diffusers: an unconditional UNet with a DDPM scheduler and an EMA copy."""

# bytes: 113.7e6 * (4 + 4 + 8 + 4)
# note: cuDNN
import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel

model = UNet2DModel(
    sample_size=64,
    block_out_channels=(128, 128, 256, 256, 512, 512),
    down_block_types=("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
).cuda()
average = EMAModel(model.parameters())
average.to("cuda")
schedule = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    images, noise = torch.rand(1, 3, 64, 64).cuda(), torch.randn(1, 3, 64, 64).cuda()
    times = torch.randint(0, 1000, (1,), device="cuda")
    predicted = model(schedule.add_noise(images, noise, times), times).sample
    torch.nn.functional.mse_loss(predicted, noise).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    average.step(model.parameters())
