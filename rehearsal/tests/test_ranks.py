"""Ranks of a rehearsal: launchers, and the messages of the ranks that do not run."""

from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import Rehearse
from tests.scripts import GIB, ONE_STEP, SHARDED, lines_of, marked

ACCELERATE = """
    compute_environment: LOCAL_MACHINE
    distributed_type: MULTI_GPU
    num_machines: 1
    num_processes: 4
    mixed_precision: 'no'
"""


def test_sharded_model_runs_as_one_of_the_requested_ranks_with_any_launcher(rehearse: Rehearse) -> None:
    answer = rehearse(SHARDED, "--rank", "3", command=("torchrun", "--nproc_per_node", "4", "train.py", "8"))
    weights = 4 * 8192 * 8192 * 4
    assert answer.status == 0
    assert f"ranks {[3] * 4} allocated {weights // 4}" in answer.printed
    whole = weights // 4  # of one layer
    assert weights // 4 + 2 * whole <= answer.found["steps"][1]["allocated_bytes"] < 2 * weights


@pytest.mark.smoke("variable")
@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ((), 1),
        (("torchrun",), 4),
        (("python", "-m", "torch.distributed.run", "--nproc-per", "4"), 4),
        (("accelerate", "launch", "--config_file", "config.yaml"), 4),
        (("accelerate", "launch", "--num_processes", "1"), 1),
    ],
    ids=["none", "variable", "module", "file", "single rank"],
)
def test_launcher_determines_the_number_of_ranks_and_an_earlier_launch_does_not(
    launcher: tuple[str, ...], ranks: int, rehearse: Rehearse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(dedent(ACCELERATE))
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "PET_NPROC_PER_NODE": "4"}.items():
        monkeypatch.setenv(name, value)
    answer = rehearse(ONE_STEP, command=(*launcher, "train.py"))
    assert (answer.status, answer.found["ranks"]) == (0, ranks), answer.printed
    assert answer.found["overhead_bytes"] == (int(1.3 * GIB) if ranks == 1 else 3 * GIB)
    assert f"ranks {ranks if ranks > 1 else None} cards {ranks} 1\n" in answer.printed


def test_number_of_ranks_in_the_script_needs_the_option(rehearse: Rehearse) -> None:
    script = "import torch.distributed as dist; dist.init_process_group('nccl', rank=0, world_size=4)"
    assert "world_size=4: pass --ranks 4" in rehearse(script).found["verdict"]


@pytest.mark.smoke
def test_host_values_are_known_after_a_collective_in_every_step(rehearse: Rehearse) -> None:
    script = """
        import torch, torch.distributed as dist

        dist.init_process_group("nccl")
        for _ in range(2):
            total, own = torch.tensor([1024]).cuda(), torch.tensor([7]).cuda()
            each, whole = [torch.empty_like(own) for _ in range(3)], torch.empty(3, dtype=torch.long, device="cuda")
            dist.all_reduce(total)
            dist.all_gather(each, own)
            dist.all_gather_into_tensor(whole, own.view(1, 1))  # like accelerate
            everyone = [None] * 3
            dist.all_gather_object(everyone, "told")
            print(total.item(), [int(one) for one in each], whole.tolist(), everyone, flush=True)
            del total, own, each, whole
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP), "--ranks", "3")
    assert answer.printed.count(f"3072 {[7] * 3} {[7] * 3} {['told'] * 3}\n") == 2, answer.printed
    assert answer.found["guesses"] == []


def test_tokens_are_spread_evenly_over_the_experts_of_all_ranks(rehearse: Rehearse) -> None:
    script = """
        import torch, torch.distributed as dist

        def load_balancing_loss_func(chosen):  # as transformers' models count tokens for a loss
            return torch.histc(chosen, bins=16, min=0, max=16).sum().item()

        dist.init_process_group("nccl")
        for _ in range(2):
            chosen = torch.rand(512, 16, device="cuda").softmax(-1).topk(2, sorted=False).indices.flatten()
            counts = torch.histc(chosen, bins=16, min=0, max=16)  # guessed
            assert load_balancing_loss_func(chosen) == 1024
            assert counts.tolist() == torch.bincount(chosen).tolist() == [64] * 16  # guessed
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts)
            sizes = [each.view(4, -1).sum(1).tolist() for each in (received, counts)]
            rows = torch.empty(sum(sizes[0]), 8, device="cuda")
            dist.all_to_all_single(rows, torch.randn(1024, 8, device="cuda")[chosen.argsort()], *sizes)
            print("exchanged", len(rows), flush=True)
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP), "--ranks", "4")
    assert answer.printed.count("exchanged 1024\n") == 2, answer.printed
    assert lines_of(answer.found["routing"]) == marked(script)
    skewed = script.replace("[64] * 16", "[128] * 8 + [0] * 8").replace(
        "bincount(chosen)", "bincount(chosen, minlength=16)"
    )
    skewed = dedent(skewed) + dedent(ONE_STEP)
    for rank, rows in (0, 2048), (3, 0):
        answer = rehearse(skewed, "--ranks", "4", "--rank", str(rank), "--skew", "2")
        assert answer.printed.count(f"exchanged {rows}\n") == 2, answer.printed


def test_map_of_the_experts_of_each_token_has_as_many_tokens_as_the_router_chose(rehearse: Rehearse) -> None:
    """As Megatron's router marks experts, and its dispatcher counts their tokens."""
    script = """
        import torch
        import torch.distributed as dist

        dist.init_process_group("nccl")
        scores = torch.rand(8192, 16, device="cuda")
        chosen = scores.topk(2).indices
        experts = torch.zeros_like(scores).int().scatter(1, chosen, 1).bool()
        counts = experts.sum(dim=0).long()
        assert counts.tolist() == [1024] * 16
        assert scores.T.contiguous().masked_select(experts.T.contiguous()).shape == (16384,)
        gathered = torch.empty(4 * 16, dtype=torch.long, device="cuda")
        dist.all_gather_into_tensor(gathered, counts)
        assert gathered.view(4, 16).transpose(0, 1).contiguous().sum(1).tolist() == [4096] * 16
        zeros = torch.zeros_like(scores)
        zeros += 1
        torch._foreach_add_([ones := torch.zeros_like(scores)], 1)
        assert zeros.int().sum().item() == zeros.numel()
        assert ones.int().sum().item() == 0  # guessed
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP), "--ranks", "4", status=0)
    assert lines_of(answer.found["places_read"])[-1:] == marked(script)


RECEIVED = {
    "dist.all_reduce(rows, dist.ReduceOp.MAX)": True,
    "dist.broadcast(rows, src=1)": True,
    "dist.all_gather(each, rows); rows = max(each)": True,
    "dist.broadcast(rows, src=0)": False,
    "dist.all_gather(each, rows); rows = each[0]": False,
    "dist.all_gather_object([None] * 2, {'rows': 4096})": False,
}
"""Whether another rank may decide the number of rows, for calls on rank 0."""


def test_sizes_that_another_rank_may_decide_are_named(rehearse: Rehearse) -> None:
    script = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    """
    for call in RECEIVED:
        script += f"""
    rows = torch.tensor(4096, device="cuda")
    each = [rows.clone(), rows.clone()]
    {call}
    layer(torch.ones(int(rows), 1024, device="cuda")).sum().backward()
    optimizer.step()
    """
    answer = rehearse(script, "--ranks", "2", "--steps", "0", status=0)
    named = {dedent(script).splitlines()[line - 1] for line in lines_of(answer.found["guesses"])}
    assert named == {call for call, differs in RECEIVED.items() if differs}


HAND_MADE_PIPELINE = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    layer = torch.nn.Linear(1024, 1024 * (1 + 3 * rank), device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    for step in range(2):
        x = torch.empty(512, 1024, device="cuda")
        if rank:
            dist.recv(x, rank - 1)
        out = layer(x)
        if rank + 1 < dist.get_world_size():
            dist.send(out.detach(), rank + 1)
        out.sum().backward()
        optimizer.step()
"""


def test_ranks_that_send_messages_are_rehearsed_together_if_there_are_few(rehearse: Rehearse) -> None:
    answer = rehearse(HAND_MADE_PIPELINE, "--ranks", "2", status=0)
    assert answer.found["rank"] == 1
    assert len(answer.found["rank_peaks"]) == 2
    assert "--together" in rehearse(HAND_MADE_PIPELINE, "--ranks", "128", status=2).printed
