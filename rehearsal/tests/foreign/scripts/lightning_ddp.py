"""Lightning's Trainer with DDP, which starts one process per GPU."""

# command: --ranks 8 -- SCRIPT
# bytes: 134.2e6 * (4 + 4 + 8 + 4 + 4)
import lightning
import torch


class Module(lightning.LightningModule):
    """A small network."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(8)])

    def training_step(self, batch, _):
        """Return the loss."""
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())


data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(512, 4096)), batch_size=8)
trainer = lightning.Trainer(
    accelerator="gpu",
    devices=torch.cuda.device_count(),
    strategy="ddp",
    max_steps=4,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(Module(), data)
