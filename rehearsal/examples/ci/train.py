"""Trains a decoder on random tokens with FSDP2. The folder is an example of a repository whose configs CI rehearses."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, **_: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
        return self.head(hidden)


def main(config: str) -> None:
    sizes = json.loads(Path(config).read_text())
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    with torch.device("meta"):
        model = Decoder(**sizes)
    for part in (*model.layers, model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(sizes["steps"]):
        tokens = torch.randint(sizes["vocabulary"], (sizes["rows"], sizes["tokens"]), device="cuda")
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
