"""Lightning's Trainer on one GPU, bf16-mixed."""

# bytes: 134.2e6 * (4 + 4 + 8 + 4)
import lightning
import torch


class Module(lightning.LightningModule):
    """A small network."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(8)])

    def training_step(self, batch, _):
        """Return the loss."""
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())


data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(64, 4096)), batch_size=8)
trainer = lightning.Trainer(
    accelerator="gpu", devices=1, max_steps=4, precision="bf16-mixed", logger=False, enable_checkpointing=False
)
trainer.fit(Module(), data)
