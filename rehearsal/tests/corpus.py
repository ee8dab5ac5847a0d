"""Steps whose memory depends on computed values: python corpus.py NAME STEPS

With KNOWN=1, the host computes the values, so a rehearsal predicts the exact peak. Otherwise, the GPU computes them,
and a rehearsal must not predict less without a warning. A comment marks the line that reads such a value.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

where = "cpu" if os.environ.get("KNOWN") else "cuda"
WIDTH, ROWS = 1024, 4096
torch.manual_seed(0)
model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8)).cuda()


def rows(count: int = ROWS) -> Tensor:
    return torch.randn(count, WIDTH, device="cuda", requires_grad=True)


def deep(x: Tensor) -> Tensor:
    for layer in model:
        x = layer(x)
    return x


def drawn(*shape: int) -> Tensor:
    return torch.rand(*shape, device=where)


def accepted_tokens(step: int) -> Tensor:
    draft, target = (torch.randint(0, 2, (64,), device=where) for _ in range(2))
    accepted = (draft.float() == target.float()).sum().item()  # here
    return deep(rows(64 * accepted + 64))


def array_decides(step: int) -> Tensor:
    scores, x = np.asarray(drawn(64).cpu()) + 0.5, rows()  # here
    if scores.max() > 0.4:
        x = deep(x)
    return model[0](x)


def balance_loss(step: int) -> Tensor:
    counts, x = drawn(8), rows()
    if counts.max() > 2 * counts.min():  # here
        x = deep(x)
    return model[0](x)


def best_of_n(step: int) -> Tensor:
    rewards = drawn(8)
    good = [at for at, reward in enumerate(rewards.tolist()) if reward >= 0.1]  # here
    return deep(rows(512 * max(len(good), 1)))


def chosen_by_topk(step: int) -> Tensor:
    lengths, scores = [64, *range(512, ROWS + 1, 512)], torch.arange(9.0).to(where)
    chosen = scores.topk(1).indices  # here
    return deep(rows(lengths[chosen.tolist()[0]]))


def contained(step: int) -> Tensor:
    drawn_numbers, x = torch.arange(8).to(where) + torch.randint(0, 1, (8,), device=where), rows()
    if 5 in drawn_numbers:  # here
        x = deep(x)
    return model[0](x)


def distinct_documents(step: int) -> Tensor:
    found = torch.randint(0, 2048, (ROWS,)).to(where) + torch.randint(0, 2, (ROWS,), device=where)
    documents = torch.unique(found)  # here
    return deep(rows(len(documents)))


def early_exit(step: int) -> Tensor:
    confidence, x = drawn(8) / 2, rows()
    for at, layer in enumerate(model):
        x = layer(x)
        if confidence[at] > 0.9:  # here
            return x
    return x


def edges_of_a_graph(step: int) -> Tensor:
    nodes = torch.arange(ROWS, device=where)
    pairs = torch.stack([nodes, (nodes + torch.randint(1, 500, (ROWS,), device=where)) % ROWS])
    graph = torch.sparse_coo_tensor(pairs, torch.ones(ROWS, device=where), (ROWS, ROWS)).coalesce()
    return deep(rows()[graph.indices()[0].cuda()])


def evaluation_later(step: int) -> Tensor:
    if step == 20:
        with torch.no_grad():
            deep(torch.randn(16 * ROWS, WIDTH, device="cuda"))
    return deep(rows())


def expert_of_the_largest_score(step: int) -> Tensor:
    scores, widths = torch.arange(4.0).to(where), [256, 1024, 2048, 4096]
    chosen = widths[scores.argmax().item()]  # here
    return deep(rows(chosen))


def fallback_for_nan(step: int) -> Tensor:
    x, share = rows(), drawn(8).fill_(-math.inf).softmax(0)
    if torch.isnan(share).any():  # here
        x = deep(x)
    return model[0](x)


def file_of_numbers(step: int) -> Tensor:
    with tempfile.TemporaryFile("w+") as file:
        json.dump({"share": float(drawn(1) / 2 + 0.5)}, file)  # here
        file.seek(0)
        return deep(rows(math.ceil(ROWS * json.load(file)["share"])))


def gate_in_a_variable(step: int) -> Tensor:
    confidence, x = drawn(1) + 0.5, rows()
    share = 2 * confidence.item() - 0.1  # here
    wide = share > 0.5
    return deep(x) if wide else model[0](x)


def halting(step: int) -> Tensor:
    x, total, more = rows(), torch.zeros(64, device=where), drawn(64) / 10
    for layer in model:
        x, total = layer(x), total + more
        if (total > 0.99).all():  # here
            break
    return x


def layer_drop(step: int) -> Tensor:
    x = rows()
    for layer in model:
        if torch.rand(1, device=where).item() < 0.1:  # here
            continue
        x = layer(x)
    return x


def league(step: int) -> Tensor:
    won = [drawn(1).item() > 0.1 for _ in range(20)]  # here
    return deep(rows()) if sum(won) / 20 > 0.7 else model[0](rows(64))


def mask_on_the_host(step: int) -> Tensor:
    copied = (drawn(ROWS) - 0.1).cpu()  # here
    return deep(rows(len(copied[copied > 0])))


def number_changed_by_a_fused_optimizer(step: int) -> Tensor:
    gate = nn.Parameter(torch.tensor(0.5, device=where))
    optimizer = torch.optim.AdamW([gate], lr=0.25, fused=True)
    (gate * -drawn(8).sum() - gate).backward()
    optimizer.step()
    return deep(rows(int(ROWS * gate.detach().item())))  # here


def number_changed_by_foreach(step: int) -> Tensor:
    averages = [torch.zeros((), device=where)]
    torch._foreach_lerp_(averages, [drawn(1).squeeze() + 1.0], 0.5)
    return deep(rows(int(ROWS * averages[0].item())))  # here


def packed_lengths(step: int) -> Tensor:
    lengths = torch.randint(1, 64, (64,), device=where)
    return deep(rows(lengths.sum().item()))  # here


def plain_float_of_a_function(step: int) -> Tensor:
    def mean() -> float:
        return float((drawn(8) + 0.5).mean())  # here

    return deep(rows()) if mean() > 0.4 else model[0](rows())


def retry_after_an_error(step: int) -> Tensor:
    def check(loss: Tensor) -> None:
        if loss > 0.5:  # here
            raise ArithmeticError("the loss is too high")

    x = rows()
    try:
        check(drawn(8).mean() + 1.0)
    except ArithmeticError:
        x = deep(x)
    return model[0](x)


def retry_without_finite_loss(step: int) -> Tensor:
    loss, x = drawn(8).mean() * math.inf, rows()
    if not math.isfinite(loss.item()):  # here
        x = deep(x)
    return model[0](x)


def root_of_a_float(step: int) -> Tensor:
    variance, x = (drawn(1) + 0.5).item(), rows()  # here
    deviation = math.sqrt(variance)
    while deviation > 0.1:
        x, deviation = deep(x), deviation / 4
    return model[0](x)


def sampled_integer(step: int) -> Tensor:
    x = rows()
    for layer in model[: torch.randint(4, 9, (), device=where).item()]:  # here
        x = layer(x)
    return x


def sampled_row(step: int) -> Tensor:
    lengths, chosen = [64] * 1024 + [ROWS] * 3072, torch.randint(2048, 4096, (8,), device=where)
    return deep(rows(lengths[chosen[0].item()]))  # here


def sampled_without_replacement(step: int) -> Tensor:
    chosen = torch.randperm(1024, device=where)[:4] + torch.randint(0, 1, (4,), device=where)
    return deep(rows(4 * int(chosen.max())))  # here


def scale_of_a_scaler(step: int) -> Tensor:
    scaler, x = torch.amp.GradScaler(where, init_scale=2.0**16), rows()
    scaler.scale(drawn(1))
    scaler._scale *= drawn(1)[0] + 1.0  # type: ignore[operator]
    if scaler.get_scale() > 2.0:  # here
        x = deep(x)
    return model[0](x)


def size_from_a_float(step: int) -> Tensor:
    share = drawn(100).mean()
    return deep(rows(math.ceil(ROWS * share.item())))  # here


def tensor_of_numbers(step: int) -> Tensor:
    shares = torch.tensor([(drawn(1) / 2 + 0.5).item() for _ in range(4)])  # here
    return deep(rows(int(ROWS * shares.mean())))


def three_arguments_of_arange(step: int) -> Tensor:
    chosen = torch.arange(0, ROWS * (drawn(1) / 2 + 0.5).item(), 1, device="cuda")  # here
    return deep(rows()[chosen.long()])


def threshold_above_random_numbers(step: int) -> Tensor:
    perplexity, x = (drawn(8).mean() + 9.0).exp(), rows()
    if perplexity.item() > 5000:  # here
        x = deep(x)
    return model[0](x)


def token_dropping(step: int) -> Tensor:
    scores = drawn(ROWS)
    chosen = (scores > 0.1).nonzero().squeeze(1)  # here
    return deep(rows()[chosen.cuda()])


def two_conditions(step: int) -> Tensor:
    one, other = drawn(2) + 1.0
    x = rows()
    if one.item() > 0.5 and other.item() > 0.5:  # here
        x = deep(x)
    return model[0](x)


def until_nothing_is_unfinished(step: int) -> Tensor:
    left = torch.arange(20, device=where) + torch.randint(1, 3, (1,), device=where)
    x, done = rows(), 0
    unfinished = left > 0
    while True:
        x = model[done % 8](x)
        done += 1
        unfinished = (left - done) > 0
        if not unfinished.any() or done == 24:  # here
            break
    return x


def while_any(step: int) -> Tensor:
    x, p, at = rows(), drawn(64), 0
    while (p < 0.9).any() and at < 16:  # here
        x, p, at = model[at % 8](x), p + 0.1, at + 1
    return x


def wider_with_the_loss(step: int) -> Tensor:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(model.parameters()), "max", patience=0)
    for value in (drawn(4).sort(descending=True).values + 1.0).tolist():  # here
        plateau.step(value)
    return deep(rows(ROWS if plateau.optimizer.param_groups[0]["lr"] < 1e-3 else 512))


def train(forward: Callable[[int], Tensor], steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        forward(step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train(globals()[sys.argv[1]], steps=int(sys.argv[2]))
