"""Work and time that a rehearsal reports for a step, compared with what the script computes."""

import pytest

from tests.conftest import Rehearse

ROWS, DIM = 2048, 1024
FIRST, OTHERS = 2 * 2 * ROWS * DIM * DIM, 3 * 2 * 3 * ROWS * DIM * DIM
"""FLOPs of four layers: forward, and backward, in which the first layer's input needs no gradient."""
WHOLE, RECOMPUTED = FIRST + OTHERS, 3 * 2 * ROWS * DIM * DIM
"""With checkpointing, the forward of all layers except the last one is repeated."""
LAYERS = f"""
    import sys, torch, torch.distributed as dist, torch.nn as nn

    ROWS, DIM = {ROWS}, {DIM}
    model = nn.Sequential(*[nn.Linear(DIM, DIM, bias=False, dtype=torch.bfloat16) for _ in range(4)])
"""
TRAINS = """
    optimizer = torch.optim.SGD(model.parameters())
    for rows in [ROWS] * 3 + [2 * ROWS]:
        model(torch.randn(rows, DIM, device="cuda", dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
PLAIN = LAYERS + "    model.cuda()\n" + TRAINS
CHECKPOINTED = (
    LAYERS
    + "    model.cuda()\n    from torch.utils.checkpoint import checkpoint\n"
    + TRAINS.replace("model(torch", "checkpoint(model, torch").replace("16))", "16), use_reentrant=False)")
)
"""Recomputation ends with an exception, so the trace has operations that never end."""
COMPILED = LAYERS + "    model.cuda().compile(dynamic=False)\n" + TRAINS
IN_MODE = f"""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {{}}))

    {LAYERS.strip()}
    model.cuda()
    Mode().__enter__()
{TRAINS}
"""
SHARDED = f"""
    {LAYERS.strip()}
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    for each in [*model, model]:
        fully_shard(each)
{TRAINS}
"""
TENSOR_PARALLEL = f"""
    {LAYERS.strip()}
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model.cuda()
    styles = [ColwiseParallel(), RowwiseParallel()] * 2
    parallelize_module(model, mesh, dict(zip("0123", styles)))
{TRAINS}
"""


@pytest.mark.parametrize(
    ("script", "ranks", "flops"),
    [
        pytest.param(PLAIN, 1, WHOLE, id="eager", marks=pytest.mark.smoke),
        pytest.param(CHECKPOINTED, 1, WHOLE + RECOMPUTED, id="checkpointed"),
        pytest.param(COMPILED, 1, WHOLE, id="compiled"),
        pytest.param(
            PLAIN.replace("zero_grad()", "zero_grad()\n        w = model[0].weight.data; w.addmm_(w, w)"),
            1,
            WHOLE + 2 * DIM**3,
            id="in place",
        ),
        pytest.param(IN_MODE, 1, WHOLE, id="dispatch mode"),
        pytest.param(TENSOR_PARALLEL, 4, WHOLE / 4, id="tensor parallel"),
    ],
)
def test_flops_are_those_of_the_matrices_on_this_rank(script: str, ranks: int, flops: int, rehearse: Rehearse) -> None:
    answer = rehearse(script, "--ranks", str(ranks), status=0)
    assert answer.found["time"]["flops"] == flops


@pytest.mark.parametrize(("split", "tokens"), [("tp", 2 * 64), ("cp", 4 * 64)])
def test_ranks_of_a_mesh_dimension_share_samples_and_wait_for_its_collectives(
    split: str, tokens: int, rehearse: Rehearse
) -> None:
    """Ranks of a context-parallel group look up different tokens of a sample."""
    script = f"""
    {LAYERS.strip()}
    from torch.distributed._functional_collectives import all_reduce
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("nccl")
    group = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "{split}"))["{split}"].get_group()
    words = nn.Embedding(1000, 4096, device="cuda")
    optimizer = torch.optim.SGD(words.parameters())
    for _ in range(2):
        rows = words(torch.zeros(1, 64, dtype=torch.long, device="cuda"))
        for _ in range(100):
            all_reduce(rows.detach(), "sum", dist.group.WORLD)
            all_reduce(rows.detach(), "sum", group)
        rows.sum().backward()
        optimizer.step()
"""
    time = rehearse(script, "--ranks", "4").found["time"]
    assert (time["tokens_per_step"], time["samples_per_step"]) == (tokens, 2)
    bandwidth = 0.7 * 450e9
    seconds = 200 * 20e-6 + 100 * 64 * 4096 * 4 * (2 * 3 / 4 + 2 * 1 / 2) / bandwidth
    assert time["parts"]["communication"] == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("slices", ["", '["cp"]'], ids=["a mesh", "a dimension of a mesh"])
def test_all_ranks_may_share_samples(slices: str, rehearse: Rehearse) -> None:
    """torch uses the default group for a mesh dimension that contains all ranks."""
    shape = '(1, 4), mesh_dim_names=("dp", "cp")' if slices else '(4,), mesh_dim_names=("cp",)'
    script = f"""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", {shape}){slices}
    assert mesh.get_group() is torch.distributed.group.WORLD
    words = torch.nn.Embedding(1000, 64, device="cuda")
    optimizer = torch.optim.SGD(words.parameters())
    for _ in range(2):
        words(torch.zeros(1, 64, dtype=torch.long, device="cuda")).sum().backward()
        optimizer.step()
"""
    time = rehearse(script, "--ranks", "4").found["time"]
    assert (time["tokens_per_step"], time["samples_per_step"]) == (4 * 64, 1)


def test_bytes_are_those_of_the_dtype(rehearse: Rehearse) -> None:
    found = [
        rehearse(script).found["time"] for script in (PLAIN, PLAIN.replace("bfloat16", "float32"))
    ]  # the update and the matrices in the same proportion
    assert found[1]["flops"] == found[0]["flops"]
    assert found[1]["memory_bytes"] == pytest.approx(2 * found[0]["memory_bytes"], rel=0.01)
    assert found[1]["seconds"] > 3 * found[0]["seconds"]  # without tf32


def test_fsdp_gathers_the_weights_twice_and_scatters_gradients_once(rehearse: Rehearse) -> None:
    time = rehearse(SHARDED, "--ranks", "4").found["time"]
    assert time["flops"] == WHOLE
    weights = 4 * DIM * DIM * 2
    assert time["collective_bytes"] == pytest.approx(3 * weights, rel=0.1)  # the last layer may be gathered once


def test_ddp_reduces_every_gradient_once_over_the_ranks_of_its_group(rehearse: Rehearse) -> None:
    script = f"""
    {LAYERS.strip()}
    dist.init_process_group("nccl")
    torch.cuda.set_device(0)
    model = nn.parallel.DistributedDataParallel(model.cuda(), process_group=dist.new_group([0, 1]))
{TRAINS}
"""
    small, large = (rehearse(script, "--ranks", ranks).found["time"] for ranks in ("2", "16"))
    assert small["collective_bytes"] == pytest.approx(4 * DIM * DIM * 2, rel=1e-4)  # DDP compares its buckets, too
    assert small["parts"]["overlapped communication"] == large["parts"]["overlapped communication"] > 0


@pytest.mark.parametrize("call", ["embed", "torch.compile(embed)", "torch.compile(in_two_graphs)"])
def test_tokens_are_counted_by_the_largest_embedding(call: str, rehearse: Rehearse) -> None:
    script = f"""
    import torch
    from torch._dynamo import graph_break

    words, positions = torch.nn.Embedding(1000, 64).cuda(), torch.nn.Embedding(128, 64).cuda()
    optimizer = torch.optim.SGD([*words.parameters(), *positions.parameters()])
    def embed(tokens, places): return words(tokens) + positions(places)
    def in_two_graphs(tokens, places): return words(tokens) + (graph_break() or positions(places + 0 * tokens))
    embed_here = {call}
    for _ in range(3):
        for _ in range(3):
            tokens = torch.randint(0, 1000, (8, 128)).cuda()
            embed_here(tokens, torch.arange(128).cuda()).sum().backward()
        optimizer.step()
    """
    time = rehearse(script, "--ranks", "2").found["time"]
    assert (time["tokens_per_step"], time["samples_per_step"]) == (2 * 3 * 8 * 128, 2 * 3 * 8)


def test_tokens_that_several_embeddings_of_a_size_look_up_count_once(rehearse: Rehearse) -> None:
    """As in modded-nanogpt, whose layers have value embeddings of the size of the vocabulary."""
    script = """
    import torch

    embeddings = torch.nn.ModuleList(torch.nn.Embedding(1000, 64) for _ in range(4)).cuda()
    optimizer = torch.optim.SGD(embeddings.parameters())
    for _ in range(2):
        for _ in range(3):
            both = torch.randint(0, 1000, (2, 8, 128)).cuda()
            sum(each(both[0]).sum() + each(both[1]).sum() for each in embeddings).backward()
        optimizer.step()
    """
    time = rehearse(script).found["time"]
    assert (time["tokens_per_step"], time["samples_per_step"]) == (3 * 2 * 8 * 128, 3 * 2 * 8)


@pytest.mark.parametrize("call", ["model(images, labels)", "torch.compile(model)(images, labels)"])
def test_class_labels_are_no_tokens(call: str, rehearse: Rehearse) -> None:
    """An embedding of labels, as in a diffusion transformer, and labels that a compiled classifier takes."""
    script = f"""
    import torch

    patches = torch.nn.Conv2d(3, 64, 8, stride=8, device="cuda")
    classes = torch.nn.Embedding(10, 64, device="cuda")
    optimizer = torch.optim.SGD([*patches.parameters(), *classes.parameters()])

    def model(images, labels): return patches(images).flatten(2).mean(2) + classes(labels)

    for _ in range(2):
        images, labels = torch.randn(16, 3, 32, 32, device="cuda"), torch.randint(0, 10, (16,)).cuda()
        {call}.sum().backward()
        optimizer.step()
    """
    time = rehearse(script).found["time"]
    assert (time["tokens_per_step"], time["samples_per_step"]) == (None, 16)


@pytest.mark.parametrize(("reentrant", "evaluated"), [(True, 0), (False, 4)])
def test_tokens_are_those_of_training(reentrant: bool, evaluated: int, rehearse: Rehearse) -> None:
    """Neither those of a recomputation, an evaluation, or a reference model, nor positions."""
    script = f"""
    import torch
    from torch.utils.checkpoint import checkpoint

    words, positions = torch.nn.Embedding(1000, 64).cuda(), torch.nn.Embedding(2000, 64).cuda()
    reference = torch.nn.Embedding(1000, 64).cuda()
    optimizer = torch.optim.SGD([*words.parameters(), *positions.parameters()])
    def embed(tokens, words=words): return words(tokens) + positions(torch.arange(128).cuda())
    for _ in range(3):
        tokens = torch.randint(0, 1000, (8, 128)).cuda()
        with torch.no_grad():
            for _ in range({evaluated}):
                embed(tokens)
                embed(tokens, reference)
        start = torch.ones(1, device="cuda", requires_grad=True)
        checkpoint(lambda _: embed(tokens), start, use_reentrant={reentrant}).sum().backward()
        optimizer.step()
    """
    time = rehearse(script, "--ranks", "2").found["time"]
    assert (time["tokens_per_step"], time["samples_per_step"]) == (2 * 8 * 128, 2 * 8)


def test_attention_has_the_rate_of_its_kernel(rehearse: Rehearse) -> None:
    script = """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    rows = torch.nn.Parameter(torch.zeros(1, 8, 8192, 128, device="cuda", dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([rows])
    for _ in range(2):
        for backend in SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION:
            with sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(rows, rows, rows).sum().backward()
        optimizer.step()
    """
    time, flops = rehearse(script).found["time"], 3.5 * 4 * 8 * 8192 * 8192 * 128
    assert time["flops"] == 2 * flops
    assert time["parts"]["compute"] == pytest.approx(flops / 335e12 + flops / (0.45 * 989e12))


def test_script_may_use_the_profiler_itself(rehearse: Rehearse) -> None:
    alone = "model(torch.ones(1, DIM, device='cuda', dtype=torch.bfloat16))"
    used = f"{PLAIN}        with torch.profiler.profile(record_shapes=True): {alone}"
    answer = rehearse(used, status=0)
    assert answer.found["time"]["flops"] == FIRST + OTHERS + 4 * 2 * DIM * DIM


def test_report_states_time_and_limit(rehearse: Rehearse) -> None:
    printed = rehearse(PLAIN, "--gpu", "a100", json_format=False).found
    for line in "time per step on a100", "(estimated: ", "limited by":
        assert line in printed
    assert max(map(len, printed.splitlines())) <= 120


@pytest.mark.smoke
def test_cards_and_ranks_give_one_table(rehearse: Rehearse) -> None:
    given = ("--gpu", "4090,h100", "--ranks", "1,2")
    answer = rehearse(SHARDED, *given, "--steps", "2", status=0)
    assert [(row["gpu"], row["ranks"], row["fits"]) for row in answer.found] == [
        ("4090", 1, True), ("h100", 1, True), ("4090", 2, True), ("h100", 2, True),
    ]  # fmt: skip
    assert all(row["seconds"] > 0 for row in answer.found)


@pytest.mark.smoke
def test_range_in_braces_is_searched(rehearse: Rehearse) -> None:
    script = PLAIN.replace("ROWS, DIM = 2048", "ROWS, DIM = 2**20 * int(sys.argv[1])")
    answer = rehearse(script, "--gpu", "l4", "--steps", "2", command=("train.py", "{1:4}"))
    largest = answer.found["largest"]
    assert (answer.status, answer.found["fits"]) == (0, True)
    assert f"{largest}: fits" in answer.printed
    assert f"{largest + 1}: does not fit" in answer.printed


def test_every_step_may_compile(rehearse: Rehearse) -> None:
    """torch's observer of operations corrupts memory if it is replaced while a function is observed."""
    script = """
        import torch

        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(100):
            torch._dynamo.reset()
            torch.compile(model, backend="eager")(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            kept = [torch.randn(step % 50 + 1) for _ in range(100)]
    """
    answer = rehearse(script, "--steps", "0")
    assert (answer.found["fits"], len(answer.found["steps"])) == (True, 100), answer.found["verdict"]
    assert answer.found["time"]


def test_trace_that_does_not_fit_on_the_disk_gives_no_time(rehearse: Rehearse) -> None:
    script = """
        import resource, torch

        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(4):
            resource.setrlimit(resource.RLIMIT_FSIZE, (16384, -1))  # of the record and of the trace
            model(torch.zeros(8, 256, device="cuda")).sum().backward()
            optimizer.step()
    """
    answer = rehearse(script)
    assert (answer.status, answer.found["time"]) == (0, None)
    assert "no time is estimated" in answer.printed
    assert rehearse(script.replace("16384", "-1")).found["time"]["seconds"] > 0
