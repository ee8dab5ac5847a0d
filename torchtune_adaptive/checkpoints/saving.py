"""Checkpoints of a run: what goes into one, gathered on rank 0 and saved so that a kill at any moment leaves the one
before."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import training
from torchtune.modules import peft
from torchtune.training._distributed import _gather_nf4_tensor
from torchtune.utils import get_logger

from torchtune_adaptive.atomic_files import replace_file
from torchtune_adaptive.checkpoints import loading, store
from torchtune_adaptive.checkpoints.identity import identity_of
from torchtune_adaptive.checkpoints.optimizer_state import AnyOptimizer, gather_state
from torchtune_adaptive.checkpoints.progress import Progress
from torchtune_adaptive.checkpoints.resuming import Start
from torchtune_adaptive.checkpoints.store import RANDOM_FILE, Checkpointer, Files, Manifest, State, find_checkpoints
from torchtune_adaptive.config.components import in_a_line
from torchtune_adaptive.config.keys import LoraSettings, Settings
from torchtune_adaptive.config.remedies import KEYS
from torchtune_adaptive.engine.memory import plain_tensors
from torchtune_adaptive.engine.oom import fatal_where_memory_runs_out, is_oom
from torchtune_adaptive.engine.ranks import from_all_ranks, from_rank_0, gloo_group_aside
from torchtune_adaptive.engine.snapshot import RngState, copied_to_host
from torchtune_adaptive.errors import CheckpointError, NotLearningError, Remedy, RunStopped, UnrecoverableError
from torchtune_adaptive.lifecycle.console import say
from torchtune_adaptive.lifecycle.run_state import THIS_RUN, RunPhase, now
from torchtune_adaptive.text import count_of, format_bytes

logger = logging.getLogger(__name__)

Sharded = dict[str, dict[str, Tensor]]
"""Weights as a rank has them, by name; under the keys of what torchtune's checkpointer takes."""
RandomState = dict[str, Any]

GATHERS_WITH_LESS = (Remedy.MORE_RANKS, Remedy.LARGER_BUDGET)
"""What helps a save, in which no rows are run."""
GONE = "the folder is gone"
SMALL_WRITE_BYTES = 2**22


@dataclass(frozen=True)
class Contents:
    """The weights that a recipe saves. With LoRA: the adapter, and the model with the adapter merged into it unless
    only the adapter is wanted."""

    recipe: str = "full"
    lora: LoraSettings | None = None
    adapter_only: bool = False
    parts: tuple[tuple[str, str], ...] = (("", training.MODEL_KEY),)
    """Modules of what is trained, and their keys in what torchtune's checkpointer takes."""

    def sharded(self, model: nn.Module) -> Sharded:
        """What rank 0 has to gather."""
        whole = {key: model.get_submodule(name).state_dict() for name, key in self.parts}
        if not self.adapter_only:
            return whole
        return {key: peft.get_adapter_state_dict(weights, None) for key, weights in whole.items()}

    def finished(self, gathered: State, model: nn.Module) -> State:
        """On rank 0: what was gathered, as torchtune's checkpointer takes it."""
        if (lora := self.lora) is None:
            return gathered
        modules = list(lora.lora_attn_modules), lora.apply_lora_to_mlp, lora.apply_lora_to_output
        for_peft = {
            "r": lora.lora_rank,
            "lora_alpha": lora.lora_alpha,
            "target_modules": peft.get_lora_module_names(*modules),
            "peft_type": "LORA",
        }
        state: State = {training.ADAPTER_CONFIG: for_peft}
        if self.adapter_only:
            return {**state, training.ADAPTER_KEY: gathered[training.MODEL_KEY]}
        # torchtune merges in place, and a weight that did not have to be gathered is the model's own.
        tensors = [*model.parameters(), *model.buffers()]
        shared = {plain.untyped_storage().data_ptr() for tensor in tensors for plain in plain_tensors(tensor)}
        own = {
            name: weight.clone() if weight.untyped_storage().data_ptr() in shared else weight
            for name, weight in gathered[training.MODEL_KEY].items()
        }
        state[training.ADAPTER_KEY] = peft.get_adapter_state_dict(own)
        state[training.MODEL_KEY] = peft.get_merged_lora_ckpt(own, rank=lora.lora_rank, alpha=lora.lora_alpha)
        return state


def gather_weights(sharded: Sharded, device: torch.device) -> State:
    """Collective: these weights, whole and on the host of rank 0, in their own precision if they are quantized.
    torchtune has a barrier after each; but a gather ends only once all have sent, so none runs ahead of rank 0."""
    first, whole = dist.get_rank() == 0, {key: dict[str, Tensor]() for key in sharded}
    for key, name, weight in ((key, *item) for key, weights in sharded.items() for item in weights.items()):
        gathered = weight.to(device) if weight.is_cpu else weight
        if isinstance(gathered, DTensor):
            quantized = isinstance(gathered.to_local(), NF4Tensor)
            gathered = _gather_nf4_tensor(gathered) if quantized else gathered.full_tensor()
        if isinstance(gathered, NF4Tensor):
            gathered = gathered.to(gathered.dtype)
        if first:
            whole[key][name] = gathered.cpu()
        elif gathered.is_cuda:
            torch.cuda.current_stream().synchronize()
    return whole


@torch.no_grad()
def weights_are_finite(model: nn.Module) -> bool:
    # A sum is NaN or infinite where any term is, and needs no memory to say so, as `isfinite` would.
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    shards = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in trained)
    sums = [shard.sum(dtype=torch.float32) for shard in shards]
    return not sums or bool(torch.stack(sums).isfinite().all())


def capture_random_state() -> RandomState:
    torch_state = RngState.capture()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch_state.cpu,
        "cuda": torch_state.cuda,
        "python": json.dumps(random.getstate()),
        "numpy": json.dumps([kind, [int(key) for key in keys], *rest]),
    }


def restore_random_state(folder: Path) -> str | None:
    """Puts this rank's generators back. Returns why that cannot be, where it cannot."""
    path = folder / RANDOM_FILE
    if not path.is_file():
        return "the checkpoint has no random state"
    states = torch.load(path, weights_only=True)
    if len(states) != dist.get_world_size():
        return f"the checkpoint has the random state of {count_of(len(states), 'rank')}"
    state: RandomState = states[dist.get_rank()]
    RngState(cpu=state["torch"], cuda=state["cuda"] if torch.cuda.is_initialized() else None).restore()
    version, internal, gauss = json.loads(state["python"])
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = json.loads(state["numpy"])
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    return None


class Written(NamedTuple):
    """A checkpoint in the staging folder that still lacks its manifest and the random generators."""

    name: str
    manifest: Manifest
    random_states: list[RandomState]


class Checkpoints:
    """Writes and reads the checkpoints of one run, in torchtune's formats."""

    def __init__(
        self,
        settings: Settings,
        start: Start,
        contents: Contents,
        device: torch.device,
        build: Callable[[DictConfig, Path, Files | None], Checkpointer] = loading.build_checkpointer,
    ) -> None:
        """Collective: creates the group that checkpoints are saved on beside training."""
        self._start = start
        self._contents = contents
        self._device = device
        self._claim = start.claim
        self._directory, self._staging = start.claim.directory, start.claim.staging
        self._save_every = settings.save_every_n_steps
        self._keep_last = settings.keep_last_n_checkpoints
        self._serial = start.serial
        # What the command names is needed again if a launcher repeats it; `auto` goes on from the newest.
        named = start.files if settings.resume_from_checkpoint is True else None
        self._goes_back_to = named.folder.name if named else None
        self._checkpointer = build(settings.config, self._staging, start.files)
        # Only rank 0 writes it. The demo's checkpointer has just made the weights that belong to it.
        self._identity = identity_of(settings.config, contents.recipe) if dist.get_rank() == 0 else {}
        self._background = BackgroundSave(self._publish) if settings.enable_async_checkpointing else None
        self._draws_from = start.files.folder if start.files else None
        self._asked_to_stop = False
        THIS_RUN.newest = start.files.folder if start.files else None

    @property
    def last(self) -> Path | None:
        """The newest complete checkpoint: what a user goes on from when the run ends here."""
        return THIS_RUN.newest

    def remove_overwritten(self) -> None:
        """On rank 0: removes another run's checkpoints, once nothing but training itself can fail any more."""
        if self._start.overwrites and dist.get_rank() == 0:
            removed = count_of(self._start.overwrites, "checkpoint")
            logger.warning("overwrite_output_dir: %s in %s removed", removed, self._directory)
            store.remove_all(self._directory)

    def load(self) -> State:
        """Collective: the weights to start from; when resuming, the checkpoint's and its state."""
        return loading.load(self._checkpointer, self._start.files, self._contents.recipe)

    def resume(self, base: State, model: nn.Module, optimizer: AnyOptimizer) -> State:
        """Collective: the recipe state to go on with; a distributed checkpoint also fills model and optimizer."""
        files = self._start.files
        if files is None or not files.distributed:
            return base
        group = self._background.group if self._background else None
        return loading.load_distributed(files.folder, model, optimizer, group)

    @contextmanager
    def going_on_to_draw(self, progress: Progress) -> Iterator[None]:
        """Collective: around the beginning of an epoch, when the loader draws from the generators. Where a run resumes
        in the middle of one, that draw has been made already and must not count twice."""
        if not progress.steps_in_epoch:
            self._restore_random_state()
        rng = RngState.capture()
        yield
        if progress.steps_in_epoch:
            rng.restore()
        self._restore_random_state()

    def _restore_random_state(self) -> None:
        """Collective: the first time, a resumed run's draws go on where the checkpoint's stopped."""
        if self._draws_from is None:
            return
        reason = restore_random_state(self._draws_from)
        self._draws_from = None
        if reason is not None:
            say(f"random draws (dropout) restart from the seed: {reason}")

    def due(self, progress: Progress, asked_to_stop: bool) -> bool:
        """Whether there is to be one here, within an epoch; where an epoch ends, there is one anyway."""
        every, sizes = self._save_every, progress.begun
        within = sizes is not None and progress.steps_in_epoch < sizes.steps
        return within and (asked_to_stop or (every is not None and progress.step % every == 0))

    def save(
        self, progress: Progress, model: nn.Module, optimizer: AnyOptimizer, loader_state: Mapping[str, object]
    ) -> None:
        """Collective: all that is needed to go on from here, under the name of the step or of the finished epoch."""
        if progress.finished:
            THIS_RUN.phase = RunPhase.LAST_SAVE
        self.wait()
        background = None if progress.finished else self._background
        name = progress.name_of_checkpoint(distributed=background is not None)
        lost = self._lost()  # before anything is written, or torch would make the folder again, on whatever is there
        finite, lost_on_ranks, random_states = zip(
            *from_all_ranks((weights_are_finite(model), lost, capture_random_state())), strict=True
        )
        manifest = Manifest(
            serial=self._serial,
            position=progress.position,
            finished=progress.finished,
            distributed=background is not None,
            ranks=dist.get_world_size(),
            identity=self._identity,
            saved_at=now(),
            files={},
        )
        self._serial += 1
        written = Written(name, manifest, list(random_states))
        if not all(finite):  # saved, they would only push out those that are
            raise NotLearningError(
                f"checkpoint {name} is not saved, because the weights are NaN or infinite; {_last_good()}: start a new "
                f"run with a lower optimizer.lr or a clip_grad_norm{', from its weights' * bool(THIS_RUN.newest)}"
            )
        if lost_on_ranks[0] is not None:
            self._lose(written, lost_on_ranks[0])
        state = {**progress.recipe_state(), training.DATALOADER_KEY: dict(loader_state)}
        began = time.perf_counter()
        with fatal_where_memory_runs_out(partial(out_of_memory_in, name)):
            if background is not None:
                state |= {training.MODEL_KEY: model.state_dict(), training.OPT_KEY: optimizer.state_dict()}
                background.start(self._staging / name, copy_of(state), written)
                return
            optimizer_state = gather_state(model, optimizer, self._device)
            weights = gather_weights(self._contents.sharded(model), self._device)
        problem = None
        if dist.get_rank() == 0:
            try:
                whole = {**self._contents.finished(weights, model), **state, training.OPT_KEY: optimizer_state}
                self._write(written, whole)
            except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it, whatever it is
                problem = cause(error, self._directory)
        self._settle(written, problem, time.perf_counter() - began)

    def _write(self, written: Written, state: State) -> None:
        """On rank 0: through torchtune's checkpointer into the staging folder, then into place."""
        epoch = written.manifest.position.epochs
        options = {"adapter_only": True} if self._contents.adapter_only else {}
        torchtunes = get_logger()
        level = torchtunes.level
        torchtunes.setLevel(logging.WARNING)  # its lines name the staging folder, where nothing stays
        try:
            self._checkpointer.save_checkpoint(state, epoch=epoch, intermediate_checkpoint=True, **options)
        finally:
            torchtunes.setLevel(level)
        folder = self._staging / f"epoch_{epoch}"
        recipe_state = self._staging / store.RECIPE_STATE / store.RECIPE_STATE_FILE
        os.replace(recipe_state, folder / store.RECIPE_STATE_FILE)
        if folder.name != written.name:
            folder.rename(self._staging / written.name)
        self._publish(written)

    def _publish(self, written: Written) -> None:
        """On rank 0: makes a checkpoint of what lies written in the staging folder."""
        name, manifest, random_states = written
        staged = self._staging / name
        torch.save(random_states, staged / store.RANDOM_FILE)
        store.write_manifest(staged, replace(manifest, files=store.record_files(staged)))
        THIS_RUN.newest = store.publish(self._claim, name)
        try:
            store.prune(self._directory, self._keep_last, self._goes_back_to)
        except OSError as error:  # the checkpoint itself is there
            logger.warning("older checkpoints in %s could not be removed: %s", self._directory, error.strerror)

    def end_if_asked(self, progress: Progress, asked_to_stop: bool) -> None:
        """Collective: ends a run that is not over, after a save, if the ranks have agreed to."""
        if (asked_to_stop or self._asked_to_stop) and not progress.finished:
            self.wait()
            raise RunStopped(f"stopped after step {progress.step}")

    def wait(self) -> None:
        """Collective: waits for what is still being written, and tells all ranks how that went."""
        if self._background is None or (written := self._background.written) is None:
            return
        error = self._background.wait()
        problems = from_all_ranks(None if error is None else cause(error, self._directory))
        problem = next(filter(None, problems), None)
        self._settle(written, problem, self._background.seconds)

    def close(self) -> None:
        self.wait()
        if dist.get_rank() == 0:
            self._claim.release()

    def _settle(self, written: Written, problem: str | None, seconds: float) -> None:
        """Collective: rank 0 tells whether the checkpoint is there, and whether it was asked to stop meanwhile."""
        lost = self._lost() if problem is not None else None
        problem, lost, self._asked_to_stop = from_rank_0((problem, lost, THIS_RUN.asked_to_stop()))
        if lost is not None:
            self._lose(written, lost)
        if problem is not None:
            self._fail(written, problem)
        THIS_RUN.newest = self._directory / written.name
        if written.manifest.finished:
            THIS_RUN.phase = RunPhase.SAVED
        say(f"checkpoint {THIS_RUN.newest} saved in {seconds:.1f} s")

    def _fail(self, written: Written, problem: str) -> NoReturn:
        message = f"checkpoint {written.name} could not be saved to {self._directory}: {problem}; {_last_good()}"
        if dist.get_rank() == 0:
            self._claim.release()
        raise CheckpointError(f"{message}; {_once_mended()}")

    def _lost(self) -> str | None:
        """On rank 0: why the output directory no longer belongs to this run; None if it does."""
        if dist.get_rank() == 0:
            try:
                self._claim.check()
            except store.NotOurs as lost:
                return str(lost)
        return None

    def _lose(self, written: Written, lost: str) -> NoReturn:
        """On every rank: ends the run. What is in the directory may be another run's."""
        if dist.get_rank() == 0:
            self._claim.release()
        THIS_RUN.newest = THIS_RUN.record_directory = None
        raise CheckpointError(f"checkpoint {written.name} is not saved: {self._directory} {lost}")


class BackgroundSave:
    """A save beside training, in a thread, one at a time. Its collectives have a group of their own."""

    def __init__(self, publish: Callable[[Written], None]) -> None:
        """Collective: creates the group. `publish` is called on rank 0, once every rank has written its part."""
        self.group = gloo_group_aside()
        self.written: Written | None = None
        """The checkpoint that is being written, or was and has not been waited for."""
        self.seconds = 0.0
        self._publish = publish

    def start(self, folder: Path, copied: State, written: Written) -> None:
        """Collective: returns at once. What is `copied` no longer changes with training."""
        began, ended = time.perf_counter(), Future[None]()

        def finish(saved: Future[object]) -> None:
            # The coordinator's future is done after the last rank has written, so what rank 0 publishes is whole.
            failed: BaseException | None = None
            try:
                saved.result()
                if dist.get_rank() == 0:
                    self._publish(written)
            except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to but `wait`
                failed = error
            self.seconds = time.perf_counter() - began
            ended.set_exception(failed)

        self.written, self._ended = written, ended
        # One thread, and so one file: with several, torch notices errors in one of them only, and would accept a
        # checkpoint that lacks the others' parts. What is on the host need not be copied ahead.
        writer = FileSystemWriter(
            folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0, sync_files=True
        )
        future = async_save(copied, storage_writer=writer, process_group=self.group, async_stager=Copied())
        assert isinstance(future, Future)
        future.add_done_callback(finish)

    def wait(self) -> BaseException | None:
        error = self._ended.exception()
        self.written = None
        return error


class Copied(BlockingAsyncStager):
    """Copying again would let training stand still for nothing."""

    def stage(self, state_dict: State) -> State:
        return state_dict


def copy_of(state: State) -> State:
    """One copy on the host, in the place of the two or three of torch's own stager."""

    def copied(value: object) -> object:
        return copied_to_host(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    copies: State = tree_map(copied, state)
    return copies


def cause(error: BaseException, directory: Path) -> str:
    """Why a checkpoint could not be written, in words that a user can act on."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    number, file = _errno_and_file(error)
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "can't start new thread" in str(error):
        return f"out of memory on the host of rank {dist.get_rank()}: free host memory"
    if is_oom(error):
        return f"out of memory on rank {dist.get_rank()}: {' or '.join(KEYS[remedy] for remedy in GATHERS_WITH_LESS)}"
    if isinstance(error, store.NotOurs):
        return str(error)
    if not directory.is_dir() or (isinstance(error, FileNotFoundError) and error.errno is None):
        return GONE
    if number is None:
        number = _errno_of_a_write(directory / store.SAVING)
    if number is not None:
        text = os.strerror(number) + f": {file}" * bool(file) + " (see ulimit -f)" * (number == errno.EFBIG)
    elif "inline_container" in str(error):
        text = f"torch could not write a file in full ({error})"
    else:
        text = in_a_line(error)
    older = [checkpoint.name for checkpoint in find_checkpoints(directory) if checkpoint.manifest][1:]
    may_go = f"; {', '.join(older)} may be removed" if older and number in (errno.ENOSPC, errno.EDQUOT) else ""
    free = format_bytes(shutil.disk_usage(directory).free)
    return f"{text} ({free} free{may_go})"


def _errno_and_file(error: BaseException | None) -> tuple[int | None, str | None]:
    """The number of the operating system's error at the bottom of this one, and the file that it is about."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno, error.filename
        error = error.__cause__ or error.__context__
    return None, None


def _errno_of_a_write(folder: Path) -> int | None:
    """What ends a small write into a folder: torch's writer does not say why its own failed."""
    try:
        replace_file(folder / "try", bytes(SMALL_WRITE_BYTES))
        (folder / "try").unlink(missing_ok=True)
    except OSError as error:
        return error.errno
    return None


def out_of_memory_in(name: str, error: Exception) -> UnrecoverableError:
    """Names the checkpoint if gathering it runs out of memory, which no rank can repeat alone."""
    return UnrecoverableError(
        f"out of memory while saving checkpoint {name} on rank {dist.get_rank()}; {_last_good()}; {_once_mended()}",
        *GATHERS_WITH_LESS,
    )


def _last_good() -> str:
    return f"the last good one is {THIS_RUN.newest}" if THIS_RUN.newest else "there is no earlier checkpoint"


def _once_mended() -> str:
    again = "resume" if THIS_RUN.newest else "start over"
    return f"once that is fixed, {again} with the same command and resume_from_checkpoint=auto"
