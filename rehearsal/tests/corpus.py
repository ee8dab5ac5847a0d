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
kept: list[object] = []
history: dict[str, float] = {}


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


def adaptive_rank(step: int) -> Tensor:
    energy = drawn(1024).sort(descending=True).values
    rank = int((energy.cumsum(0) / energy.sum() < 0.9).sum())  # here
    x = rows()
    return model[0](x) + (x @ torch.randn(WIDTH, rank * 8, device="cuda")).sum(1, keepdim=True)


def argument_of_a_function(step: int) -> Tensor:
    def sized(share: float) -> Tensor:
        return rows(int(share * ROWS))

    return deep(sized((drawn(1) / 2 + 0.5).item()))  # here


def array_decides(step: int) -> Tensor:
    scores, x = np.asarray(drawn(64).cpu()) + 0.5, rows()  # here
    if scores.max() > 0.4:
        x = deep(x)
    return model[0](x)


def average_of_the_best(step: int) -> Tensor:
    loss, best = drawn(1) + 1.0, 1e9 if step == 0 else 1.0
    if best - loss.item() > 1e6:  # here
        kept.append([torch.empty_like(each) for each in model.parameters() for _ in range(4)])
    return deep(rows())


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


def converges(step: int) -> Tensor:
    x, error, at = rows(), drawn(1) + 1.0, 0
    while error > 0.01 and at < 16:  # here
        x, error, at = model[at % 8](x), error / 2, at + 1
    return x


def curriculum(step: int) -> Tensor:
    loss, length = drawn(1) + 2.0, 1024
    if loss.item() > 1.0:  # here
        length = ROWS
    return deep(rows(length))


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


def entropy_bonus(step: int) -> Tensor:
    probabilities, x = drawn(64).softmax(0), rows()
    entropy = -(probabilities * probabilities.log()).sum()
    if entropy.item() >= 1.0:  # here
        x = deep(x)
    return model[0](x)


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


def filtered_experts(step: int) -> Tensor:
    load, x = drawn(8) + 0.1, rows()
    for layer in [each for at, each in enumerate(model) if load[at].item() > 0.05]:  # here
        x = layer(x)
    return model[0](x)


def gate(step: int) -> Tensor:
    gate, x = torch.tensor(0.0).to(where), rows()
    if torch.sigmoid(gate).item() > 0.4:  # here
        x = deep(x)
    return model[0](x)


def gate_in_a_variable(step: int) -> Tensor:
    confidence, x = drawn(1) + 0.5, rows()
    share = 2 * confidence.item() - 0.1  # here
    wide = share > 0.5
    return deep(x) if wide else model[0](x)


def generator_of_sizes(step: int) -> Tensor:
    sizes = (int(ROWS * share) for share in (drawn(4) / 2 + 0.5).tolist())  # here
    return deep(rows(sum(sizes)))


def gradient_surgery(step: int) -> Tensor:
    one, other = (drawn(64) - 1 for _ in range(2))
    x = rows()
    if (one * other).sum() > 0:  # here
        x = x + torch.randn(8, ROWS, WIDTH, device="cuda").sum(0)
    return deep(x)


def halting(step: int) -> Tensor:
    x, total, more = rows(), torch.zeros(64, device=where), drawn(64) / 10
    for layer in model:
        x, total = layer(x), total + more
        if (total > 0.99).all():  # here
            break
    return x


def k_from_a_float(step: int) -> Tensor:
    share, x = drawn(1) / 2 + 0.5, rows()
    k = int(share.item() * ROWS)  # here
    return deep(x[torch.topk(x[:, 0], k).indices])


def layer_drop(step: int) -> Tensor:
    x = rows()
    for layer in model:
        if torch.rand(1, device=where).item() < 0.1:  # here
            continue
        x = layer(x)
    return x


def longer_rows_later(step: int) -> Tensor:
    return deep(rows(ROWS if step < 20 else 4 * ROWS))


def longest_length(step: int) -> Tensor:
    lengths = (drawn(64) * ROWS).long()
    return deep(rows(lengths.max().item()))  # here


def mask_of_an_array(step: int) -> Tensor:
    kept_rows = drawn(ROWS).cpu().numpy() > 0.1  # here
    return deep(rows()[torch.from_numpy(np.arange(ROWS)[kept_rows]).cuda()])


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


def replay_buffer(step: int) -> Tensor:
    kept.append(torch.randn(ROWS, WIDTH, device="cuda"))
    return deep(rows())


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


def running_average(step: int) -> Tensor:
    history["loss"] = 0.9 * history.get("loss", 0.0) + float(drawn(1) + 1.0)  # here
    return deep(rows(ROWS if history["loss"] > 0.5 else 512))


def sampled_depth(step: int) -> Tensor:
    x, depth = rows(), 1 + int(torch.rand((), device=where).item() * 8)  # here
    for layer in model[:depth]:
        x = layer(x)
    return x


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


def step_is_skipped(step: int) -> Tensor:
    norm, x = drawn(1) + 0.5, deep(rows())
    if norm.item() < 0.1:  # here
        return x
    kept.append(x.detach())
    return x


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


def unfrozen_later(step: int) -> Tensor:
    if step in (0, 20):
        model[:7].requires_grad_(step == 20)
    return deep(rows())


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


def warm_up_until_stable(step: int) -> Tensor:
    history, x = drawn(8), rows()
    stable = history.std().item() < 0.9  # here
    if stable:
        x = deep(x)
    return model[0](x)


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


def window_of_two_numbers(step: int) -> Tensor:
    ratio, x = drawn(8).mean() * 0.01 + 1.0, rows()
    divergence = (ratio - 0.999).item()  # here
    if 0.9 < ratio.item() < 1.1 and divergence < 0.015:  # here
        x = deep(x)
    return model[0](x)


def train(forward: Callable[[int], Tensor], steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        forward(step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train(globals()[sys.argv[1]], steps=int(sys.argv[2]))
