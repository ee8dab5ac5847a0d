"""Lightning: two processes train with FSDP2, and survive that one of them runs out of memory. No torchtune, no GPU:

pip install . lightning
python examples/lightning_fsdp2.py
"""

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchtune_adaptive import MemoryMeter, RowLimit, SampleKind, StepRunner, Totals


class NextTokens(lightning.LightningModule):
    automatic_optimization = False  # so that `training_step` runs the backward pass and the update

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(128, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

    def configure_model(self):
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    def forward_backward(self, samples):
        """One microbatch. The loss is a sum, so that a sample counts the same however the step is split."""
        tokens = nn.utils.rnn.pad_sequence(samples, batch_first=True)
        logits, labels = self.model(tokens[:, :-1].flatten()), tokens[:, 1:].flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=0, reduction="sum")
        self.manual_backward(loss)
        return Totals(loss.detach(), int((labels != 0).sum()))

    def on_train_start(self):
        kind = SampleKind(length_of=len, filler=lambda sample: sample[:2])
        self.runner = StepRunner(self.model, self.forward_backward, limit=RowLimit(16), kind=kind)

    def training_step(self, samples, index):
        """A step: `samples` is a list, which the runner splits into microbatches."""
        optimizer = self.optimizers()
        # Simulates the memory of a GPU: rank 1 has too little for 16 samples at once.
        with MemoryMeter(cap_bytes=4_000_000 if self.global_rank == 1 else None):
            result = self.runner.run(samples, step=index + 1)
        for parameter in self.model.parameters():  # from the average over ranks to the mean over target tokens
            parameter.grad.mul_(self.trainer.world_size / result.target_tokens)
        with self.runner.committing("optimizer.step", last_checkpoint=None):
            optimizer.step()
        optimizer.zero_grad()
        if self.global_rank == 0:
            loss = result.loss_sum.item() / result.target_tokens
            print(f"step {index + 1}: loss {loss:.4f}, at most {self.runner.limit.rows} rows", flush=True)

    def on_train_end(self):
        self.runner.close()


if __name__ == "__main__":
    torch.manual_seed(0)
    data = [torch.arange(1, length) for length in torch.randint(8, 64, (256,)).tolist()]
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(NextTokens(), torch.utils.data.DataLoader(data, batch_size=16, collate_fn=list))
