"""What the package assumes about private names of torch. The name of a check begins with the modules that rely on it.

Assumptions that a test of these modules shows as directly are not repeated here.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, UntypedStorage, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.ranks import run_on_ranks
from torchtune_adaptive.engine import fsdp, ghost, ranks
from torchtune_adaptive.engine.fsdp_ledger import FsdpLedger
from torchtune_adaptive.engine.ghost_ledger import GhostLedger
from torchtune_adaptive.engine.messages import communicates, messages
from torchtune_adaptive.engine.meter import MemoryMeter
from torchtune_adaptive.engine.ranks import full_tensor
from torchtune_adaptive.engine.snapshot import _idles


def layers(*mesh_shape: int, **options: Any) -> Any:
    """Collective: return a sharded model. FSDP pads its odd sizes, and one rank has no element of the last weight."""
    torch.manual_seed(0)
    model, shape = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)), mesh_shape or (2,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def forward(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 3) + dist.get_rank()).sum()


def gradients(model: nn.Module) -> Tensor:
    """Collective: run a pass; return the gradients of the whole model, and drop them."""
    forward(model).backward()
    found = torch.cat([full_tensor(each.grad).flatten() for each in model.parameters()])
    model.zero_grad()
    return found


class Operations(TorchDispatchMode):
    """Notes the operations that communicate, and does not run them if it `skips`."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.seen: list[ghost._Call] = []
        self._skips = skips

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = ghost._Call(func, args, kwargs or {})
        if communicates(func):
            self.seen.append(call)
            if self._skips:
                return args[0], ghost.FakeWork().boxed()
        return call.run()


def engine_fsdp_ledger_counts_every_message_of_fsdp() -> None:
    for shape in ((2,), (2, 1)):
        model = layers(*shape)
        ledger = FsdpLedger(model)
        ledger.begin_attempt(1, [model])
        ledger.begin_microbatch(0)
        before = messages()
        forward(model).backward()
        assert ledger.position == (messages() - before).total() > 0


def engine_fsdp_and_ghost_know_what_an_all_gather_sends() -> None:
    model, gathered = layers(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), []
    assert fsdp.gathered_bytes(model) == [2 * (15 + 5), 2 * (5 + 1)] == fsdp.gathered_bytes(model)

    def unshard(group: Any, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        before = len(operations.seen)
        original(*args, **kwargs)
        gathered.extend([group] * (len(operations.seen) - before))

    for group in fsdp.groups_of(model):
        vars(group)["unshard"] = partial(unshard, group, group.unshard)
    with Operations() as operations:
        forward(model).backward()
    sent = [each.args[1] for each in operations.seen if each.name == "_allgather_base_"]
    for group, shard in zip(gathered, sent, strict=True):
        fsdp.copy_shards(group, copied := torch.full_like(shard, torch.nan))
        assert torch.equal(copied, shard)
    assert {*map(id, gathered)} == {*map(id, fsdp.groups_of(model))}


def has_unreduced_gradients(model: Any) -> bool:
    with suppress(ValueError):
        fsdp.check_gradients_reduced(fsdp.groups_of(model))
        return fsdp.modules_awaiting_all_reduce(model) == ["0", "1"]
    return not any(group.reduce_grads for group in fsdp.groups_of(model))


def engine_fsdp_keeps_gradients_back_until_it_may_reduce_them() -> None:
    for shape in ((2,), (2, 1)):
        model = layers(*shape)
        may_reduce = model.set_requires_all_reduce if fsdp.has_replicas(model) else model.set_requires_gradient_sync
        expected = gradients(model)
        for abandons in (False, True):
            may_reduce(False)
            with Operations() as operations:
                forward(model).backward()
            assert not any("reduce" in each.name for each in operations.seen)
            assert has_unreduced_gradients(model)
            may_reduce(True)
            if abandons:
                fsdp.abandon(model)
            assert torch.equal(gradients(model), expected if abandons else 2 * expected)
            assert not has_unreduced_gradients(model)


def engine_fsdp_ends_a_pass_without_a_backward() -> None:
    def gathered_bytes() -> int:
        parameters = [each for group in groups for each in group.fsdp_params]
        return sum(each._unsharded_param.untyped_storage().size() for each in parameters)

    model = layers(reshard_after_forward=False)
    groups, expected = fsdp.groups_of(model), gradients(model)
    for end in (fsdp.end_pass_without_backward, fsdp.reset):
        assert not fsdp.awaits_backward(model)
        forward(model)
        assert fsdp.awaits_backward(model)
        assert gathered_bytes() >= sum(fsdp.gathered_bytes(model))
        assert not any(group.is_sharded for group in groups)
        for group in groups if end is fsdp.reset else ():  # as after an error halfway through an all-gather
            group._sharded_state = fsdp.ShardedState.SHARDED
        end(model)
        assert gathered_bytes() == 0
        assert all(group.is_sharded for group in groups)
        assert torch.equal(gradients(model), expected)


def engine_memory_sees_gathered_weights_as_growing_storages() -> None:
    model, grown, resize = layers(), [], UntypedStorage.resize_
    gradients(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UntypedStorage, "resize_", lambda *to: grown.append(to[1] - to[0].size()) or resize(*to))
        forward(model)
    assert sum(each for each in grown if each > 0) >= sum(fsdp.gathered_bytes(model))


def engine_ghost_sees_each_collective_once_with_its_group() -> None:
    two, four = torch.ones(2, dtype=torch.long), torch.ones(4, dtype=torch.long)
    group, ghosts = dist.group.WORLD, GhostLedger()
    calls: list[Callable[[], Any]] = [
        lambda: dist.broadcast(two, 0),
        lambda: dist.all_reduce(two),
        lambda: dist.all_gather([two.clone(), two.clone()], two),
        lambda: dist.all_gather_into_tensor(four, two),
        lambda: dist.reduce_scatter_tensor(two, four),
        lambda: dist.all_to_all_single(four, four.clone()),
        lambda: functional.all_reduce(two, "sum", group),
        lambda: functional.all_gather_tensor(two, 0, group),
        lambda: functional.reduce_scatter_tensor(four, "sum", 0, group),
        lambda: functional.all_to_all_single(four, None, None, group),
        lambda: functional.broadcast(two, 0, group),
    ]
    for call in calls:
        before = messages()
        ghosts.begin_microbatch(0)
        with Operations() as operations:
            ghost._wait(call())
        [operation], [logged] = operations.seen, ghosts._log
        assert messages() - before == {group.group_name: 1}
        assert operation.name in ghost._SUPPORTED
        assert ghost.group_of((*operation.args, *operation.kwargs.values())) is group
        assert operation.in_place == any(each is True for each in operation.asynchronous().args)
        assert {*map(id, operation.tensors)} & {*map(id, logged.tensors)}
    before = messages()
    with Operations(skips=True):
        dist.all_reduce(two)
        dist.all_reduce(two, async_op=True).wait()
    assert messages() == before


def engine_ghost_clears_the_mask_of_a_failed_pass() -> None:
    mesh, ghosts, weight = init_device_mesh("cpu", (2,)), GhostLedger(), torch.arange(8.0).view(4, 2)
    sharded = distribute_tensor(weight, mesh, [Shard(0)])
    first, second = (distribute_tensor(torch.tensor(each), mesh, [Replicate()]) for each in ([0, 3], [2, 1]))
    F.embedding(first, sharded)  # an error before its sum would use the mask
    assert len(ghosts._masks) == 1
    ghosts.drop_masks()
    assert torch.equal(F.embedding(second, sharded).full_tensor(), weight[[2, 1]])


def engine_ranks_finds_groups_in_the_order_of_their_creation_and_counts_their_messages() -> None:
    created, world = [dist.new_group([0, 1]) for _ in range(3)], dist.distributed_c10d._world
    assert [*world.pg_map][-3:] == created
    before = messages()
    dist.all_reduce(torch.ones(1), group=created[1])
    dist.barrier(created[1])
    assert messages() - before == {created[1].group_name: 2}


def engine_ranks_recognizes_gloos_worker_threads_by_name() -> None:
    dist.barrier()
    assert ranks._gloo_threads()


ON_TWO_RANKS = [each for name, each in [*globals().items()] if name.startswith("engine_")]


@pytest.mark.parametrize("check", ON_TWO_RANKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check: Callable[[], None]) -> None:
    run_on_ranks(2, check, timeout_s=20)


def test_engine_ghost_computes_with_sizes_only() -> None:
    real = torch.ones(2)
    with ghost.FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        fake = torch.ones(2) + real
        assert ghost.is_fake(fake)
        assert ghost.maybe_get_fake_mode(fake) is ghost.get_dispatch_mode(ghost.DispatchModeKey.FAKE) is fakes
        with ghost.FakeTensorMode() as inner:
            assert ghost.get_dispatch_mode(ghost.DispatchModeKey.FAKE) is inner
        with pytest.raises(ghost.DataDependentOutputException):
            fake.sum().item()
        with pytest.raises(ghost.DynamicOutputShapeException):
            fake.nonzero()
        with ghost.unset_fake_temporarily():
            assert not ghost.is_fake(torch.ones(2))
        fakes.allow_non_fake_inputs = False
        with pytest.raises(Exception, match="allow_non_fake_inputs"):
            fake + real


def test_engine_ghost_and_snapshot_and_hf_steps_recognize_compiled_code() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters())
    assert (module._compiled_call_impl, hasattr(module, "_orig_mod"), _idles(optimizer)) == (None, False, True)
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None
    assert torch.compile(module, backend="eager")._orig_mod is module
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    assert not _idles(optimizer)


def test_engine_probes_and_snapshot_leave_all_modes() -> None:
    with MemoryMeter(cap_bytes=0) as meter, ghost.FakeTensorMode():
        assert not ghost.is_fake(_disable_current_modes()(torch.ones)(9))
        assert ghost.is_fake(torch.ones(9))
        assert meter.live_bytes == 0
