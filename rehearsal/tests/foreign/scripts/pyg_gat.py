"""PyTorch Geometric: a graph attention network on one large graph."""

# bytes: 2_100_000 * 256 * 4 * 3
# at most: 1.5
import torch
from torch_geometric.nn import GATConv

nodes, edges = 100_000, 2_000_000
features, links = torch.rand(nodes, 128).cuda(), torch.randint(nodes, (2, edges)).cuda()
first, second = GATConv(128, 64, heads=4).cuda(), GATConv(256, 40).cuda()
optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
for _ in range(3):
    logits = second(first(features, links).relu(), links)
    torch.nn.functional.cross_entropy(logits, torch.zeros(nodes, dtype=torch.long, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
