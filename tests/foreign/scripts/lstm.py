"""An LSTM language model."""

# bytes: 51.7e6 * (4 + 4 + 8 + 4)
import torch

words, lstm, head = torch.nn.Embedding(10000, 2048).cuda(), torch.nn.LSTM(2048, 1024, 2, batch_first=True).cuda(), None
head = torch.nn.Linear(1024, 10000).cuda()
parts = torch.nn.ModuleList([words, lstm, head])
optimizer = torch.optim.AdamW(parts.parameters())
for _ in range(3):
    tokens = torch.randint(10000, (4, 32)).cuda()
    torch.nn.functional.cross_entropy(head(lstm(words(tokens))[0]).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
