"""Models whose ranks exchange activations, and layers whose values matter."""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint
from torchtune import modules, training
from torchtune.models.llama3 import llama3

from tests.distributed.models import VOCABULARY, Parts, batch_of, computes, device
from torchtune_adaptive.engine.results import Totals

LENGTH = 8
EXPERTS, PER_TOKEN, DIM = 6, 2, 16


@dataclass(frozen=True)
class OnMesh:
    """A model, and how ranks share it."""

    build: Callable[["OnMesh"], nn.Module]
    shared_by: int = 2
    """Ranks that share samples."""
    replicas: int = 1
    experts_sharded_by: int = 1
    """Ranks over which FSDP shards the weights of the same experts."""
    checkpointing: bool = False
    param_dtype: torch.dtype | None = None
    """FSDP gathers parameters in this type."""
    compiled: bool = False
    """Compile each layer."""
    needs_values: bool = False
    """Sizes or conditions depend on computed values, which a null device does not have."""
    exchanges_activations: bool = False
    """True if parameters do not show that ranks exchange activations."""

    clips = False
    """Norms over several meshes are not computed."""

    def samples(self, count: int) -> list[Tensor]:
        """Return samples of this rank."""
        generator = torch.Generator().manual_seed(dist.get_rank() // self.shared_by)
        return [torch.randint(0, VOCABULARY, (LENGTH,), generator=generator) for _ in range(count)]

    def parts(self) -> Parts:
        """Collective: build the model."""
        torch.manual_seed(0)
        model = self.build(self)
        for layer in model.layers if self.compiled else ():
            layer.compile(backend="aot_eager")

        def forward_backward(samples: Sequence[Tensor]) -> Totals:
            tokens, labels, target_tokens = batch_of(samples)
            logits = model(tokens)
            with loss_parallel() if isinstance(logits, DTensor) else nullcontext():
                mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
                loss = mean * target_tokens
                loss.backward()
            loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
            return Totals(loss.detach(), target_tokens)

        return [model], forward_backward


def mesh_of(case: OnMesh) -> DeviceMesh:
    """Collective."""
    sizes = (case.replicas, dist.get_world_size() // case.shared_by // case.replicas, case.shared_by)
    return init_device_mesh(device().type, sizes, mesh_dim_names=("replicas", "shards", "shared"))


def tensor_parallel(case: OnMesh) -> nn.Module:
    """Collective: build a Llama under tensor, sequence and loss parallelism; FSDP shards layers over further ranks."""
    mesh = mesh_of(case)
    model = llama3(
        vocab_size=VOCABULARY,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        embed_dim=DIM,
        intermediate_dim=24,
        max_seq_len=64,
    )
    model = parallelize(model.to(device()), mesh["shared"])
    if case.checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    if dist.get_world_size() > case.shared_by:
        over = mesh["replicas", "shards"] if case.replicas > 1 else mesh["shards"]
        for each in (*model.layers, model):
            fully_shard(each, mesh=over)
    return model


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply tensor, sequence and loss parallelism to a Llama."""
    model = training.prepare_mha_for_tp(model, mesh)
    both = (Replicate(), Replicate())
    layer = {
        "attn": PrepareModuleInput(input_layouts=(Shard(1), Shard(1)), desired_input_layouts=both),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **dict.fromkeys(("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.w1", "mlp.w3"), ColwiseParallel()),
        **dict.fromkeys(("attn.output_proj", "mlp.w2"), RowwiseParallel(output_layouts=Shard(1))),
        **dict.fromkeys(("sa_norm", "mlp_norm"), SequenceParallel()),
    }
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **{f"layers.*.{name}": style for name, style in layer.items()},
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(model, mesh, plan)


class Experts(nn.Module):
    """The experts of this rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        weights = (torch.randn(EXPERTS, DIM, DIM) / DIM for _ in range(2))
        self.up, self.down = (nn.Parameter(distribute_tensor(each, mesh, [Shard(0)])) for each in weights)

    def forward(self, tokens: Tensor, counts: list[int]) -> Tensor:
        up, down = self.up.to_local(), self.down.to_local()
        return torch.cat([F.gelu(part @ up[each]) @ down[each] for each, part in enumerate(tokens.split(counts))])


class RoutedExperts(nn.Module):
    """Routed experts over ranks, with the layout and the calls of torchtitan. Version 0.3 counts tokens in a mask."""

    def __init__(self, mesh: DeviceMesh, *, counts_mask: bool) -> None:
        super().__init__()
        self.counts_mask = counts_mask
        self.group, self.ranks = mesh.get_group(), mesh.size()
        self.router, self.experts = nn.Linear(DIM, EXPERTS, bias=False), Experts(mesh)

    def forward(self, states: Tensor) -> Tensor:
        tokens = states.flatten(0, -2)
        every = self.router(tokens).softmax(-1)
        scores, experts = every.topk(PER_TOKEN, dim=-1)
        if not computes():
            every_expert, rest = divmod(experts.numel(), EXPERTS)
            counts = torch.tensor([every_expert + (each < rest) for each in range(EXPERTS)]).to(tokens.device)
        elif self.counts_mask:
            chosen = torch.zeros_like(every, dtype=torch.bool).scatter_(-1, experts, True)
            counts = tokens.new_zeros(EXPERTS, dtype=torch.long).add_(chosen.sum(0))
        else:
            counts = torch.histc(experts.flatten().float(), EXPERTS, 0, EXPERTS).long()
        order = experts.flatten().argsort(stable=True)
        with torch.no_grad():
            if self.counts_mask:
                theirs = all_to_all_single(counts, None, None, self.group)
            else:  # as transformers does
                theirs = torch.empty_like(counts)
                dist.all_to_all_single(theirs, counts, group=self.group)
            of_them = theirs.cpu().view(self.ranks, -1)  # a null device computes no sums
            sends, receives = counts.cpu().view(self.ranks, -1).sum(1).tolist(), of_them.sum(1).tolist()
        received = all_to_all_single_autograd(tokens[order // PER_TOKEN], receives, sends, self.group)
        # by rank and expert -> by expert
        own = torch.arange(EXPERTS // self.ranks, device=tokens.device).repeat(self.ranks)
        of_expert = own.repeat_interleave(theirs, output_size=sum(receives))
        by_expert = of_expert.argsort(stable=True)
        found = self.experts(received[by_expert], of_them.sum(0).tolist())
        back = torch.empty_like(found).index_copy(0, by_expert, found)
        back = all_to_all_single_autograd(back, sends, receives, self.group)
        weighted = back * scores.flatten()[order][:, None]
        return states + torch.zeros_like(tokens).index_add(0, order // PER_TOKEN, weighted).view_as(states)


class LocalExperts(nn.Module):
    """Experts that FSDP shards over all ranks. As in transformers, experts without tokens are skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.weights = nn.Parameter(torch.randn(EXPERTS, DIM, DIM) / DIM)

    def forward(self, states: Tensor) -> Tensor:
        tokens = states.flatten(0, -2)
        scores, experts = self.router(tokens).softmax(-1).topk(PER_TOKEN, dim=-1)
        result = torch.zeros_like(tokens)
        for number in experts.unique().tolist():
            row, choice = (experts == number).nonzero(as_tuple=True)
            found = F.gelu(tokens[row] @ self.weights[number]) * scores[row, choice][:, None]
            result = result.index_add(0, row, found)
        return states + result.view_as(states)


class ValuesMatter(nn.Linear):
    """Refuses infinite scores, keeps the features that it draws, and adds a row of a table, chosen by the distance
    between two vectors of length 1."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)
        self.table = nn.Parameter(torch.randn(16, DIM))
        self.temperature = nn.Parameter(torch.ones(1))  # one of the ranks has no element of it

    def forward(self, states: Tensor) -> Tensor:
        scores = super().forward(states)
        if not scores.isfinite().all():
            raise FloatingPointError("a layer returned NaN")
        drawn = torch.multinomial(torch.softmax(scores, -1).flatten(0, -2), DIM // 2, replacement=True)
        kept = scores * torch.zeros_like(scores).scatter(-1, drawn.view(*scores.shape[:-1], -1), 1.0)
        chosen = torch.sigmoid(F.normalize(scores, dim=-1, eps=0.0).sum(-1) / self.temperature)
        return kept + self.table[(chosen * 15.9).long()] * self.temperature


class Stack(nn.Module):
    """Layers between an embedding and a head. Ranks of a mesh take a part of each sequence, and gather their logits."""

    def __init__(
        self, layers: Iterable[nn.Module], *, checkpointing: bool = False, mesh: DeviceMesh | None = None
    ) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.layers = nn.ModuleList(layers)
        self.checkpointing, self.mesh = checkpointing, mesh

    def forward(self, tokens: Tensor) -> Tensor:
        if self.mesh is not None:
            tokens = tokens.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()]
        states = self.embedding(tokens)
        for layer in self.layers:
            states = checkpoint(layer, states, use_reentrant=False) if self.checkpointing else layer(states)
        logits = self.output(states)
        return logits if self.mesh is None else all_gather_tensor_autograd(logits, 1, self.mesh.get_group())


def expert_parallel(case: OnMesh) -> nn.Module:
    """Collective: build a model with experts on all ranks. FSDP shards layers, and gathers them again in backward."""
    every = init_device_mesh(device().type, (dist.get_world_size(),))
    sizes = (case.experts_sharded_by, dist.get_world_size() // case.experts_sharded_by)
    mesh = init_device_mesh(device().type, sizes, mesh_dim_names=("shards", "experts"))
    layers = [RoutedExperts(mesh["experts"], counts_mask=each) for each in (False, True)]
    model = Stack(layers, checkpointing=case.checkpointing).to(device())
    precision = MixedPrecisionPolicy(case.param_dtype)
    whole: set[nn.Parameter] = set()
    for layer in model.layers:
        if case.experts_sharded_by > 1:
            fully_shard(layer.experts, mesh=mesh["shards"], mp_policy=precision)
        else:
            whole.update(layer.experts.parameters())
        fully_shard(layer, mesh=every, mp_policy=precision, ignored_params=whole)
    return fully_shard(model, mesh=every, mp_policy=precision, ignored_params=whole)


class SplitLayers(nn.Module):
    """Two linear layers, each split over two ranks, with `inside` between them."""

    def __init__(self, inside: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.inside = nn.Linear(DIM, DIM), nn.Linear(DIM, VOCABULARY), inside
        self.register_buffer("table", torch.randn(VOCABULARY, DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(self.inside(self.up(F.embedding(tokens, self.table))))


def split_layers(inside: Callable[[Tensor], Tensor], case: OnMesh) -> nn.Module:
    """Collective: build a model under tensor parallelism that calls `inside` with its part of the activations."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(SplitLayers(inside).to(device()), mesh_of(case)["shared"], plan)


class Scaled(torch.autograd.Function):
    """Scales by the sum over ranks, and communicates in the backward as well."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        total = value.detach().mean()
        dist.all_reduce(total)
        context.save_for_backward(value, total)
        return value * total

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        value, total = context.saved_tensors
        along_total = (gradient * value).sum() / value.numel()
        dist.all_reduce(along_total)
        return gradient * total + along_total


def scaled(value: Tensor) -> Tensor:
    return Scaled.apply(value)


@torch.library.custom_op("torchtune_adaptive_tests::tripled", mutates_args=())
def operator(value: Tensor) -> Tensor:
    return 3 * value


def tripled(value: Tensor) -> Tensor:
    return operator(value)


torch.library.register_autograd("torchtune_adaptive_tests::tripled", lambda context, gradient: 3 * gradient)
torch.library.register_fake("torchtune_adaptive_tests::tripled", torch.empty_like)


def masked_on_all_ranks(value: Tensor) -> Tensor:
    """Compute a mask that ranks exchange, after a barrier."""
    dist.barrier()
    mask = value.detach().mean(-1) > 0
    masks = torch.empty((2, *mask.shape), dtype=torch.bool)
    dist.all_gather_into_tensor(masks.flatten(), mask.flatten())
    return value * masks.all(0).unsqueeze(-1)


class InContext(nn.Module):
    """Attention in context parallelism: each rank has a part of every sequence, and gathers the others."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group, self.inner, self.outer = mesh.get_group(), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, states: Tensor) -> Tensor:
        mine = self.inner(states)
        every = all_gather_tensor_autograd(mine, 1, self.group)
        return states + self.outer(F.scaled_dot_product_attention(mine, every, every))


def context_parallel(case: OnMesh) -> nn.Module:
    """Collective: build a model under context parallelism; FSDP shards layers over all ranks."""
    mesh = mesh_of(case)["shared"]
    model = Stack([InContext(mesh) for _ in range(2)], mesh=mesh).to(device())
    for each in (*model.layers, model):
        fully_shard(each, mesh=init_device_mesh(device().type, (dist.get_world_size(),)))
    return model


def sharded(layer: Callable[[], nn.Module], case: OnMesh) -> nn.Module:
    """Collective: build a model with such layers, for FSDP alone: ranks exchange no activations."""
    model = Stack([layer(), layer()], checkpointing=case.checkpointing).to(device())
    for each in (*model.layers, model):
        fully_shard(each, mp_policy=MixedPrecisionPolicy(case.param_dtype))
    return model


def torchtitan(kind: str, case: OnMesh) -> nn.Module:
    """Collective: build one of torchtitan's models, as in the example."""
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
    example = import_module("torchtitan_models")
    return example.build(kind, checkpointing=example.FullAC.Config() if case.checkpointing else None)
