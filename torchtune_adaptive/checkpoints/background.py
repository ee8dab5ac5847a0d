"""Saving beside training: torch.distributed.checkpoint writes a copy of the state on the host, in a thread."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.utils._pytree import tree_map

from torchtune_adaptive.checkpoints.contents import State
from torchtune_adaptive.checkpoints.manifest import Manifest
from torchtune_adaptive.checkpoints.random_state import RandomState
from torchtune_adaptive.engine.memory import copied_to_host
from torchtune_adaptive.engine.ranks import gloo_group_aside

Finished: TypeAlias = tuple[str, Manifest, list[RandomState]]
"""What is left to be added to a checkpoint that is written: its name, its manifest, the random generators."""


class BackgroundSave:
    """One save at a time. Its collectives have a group of their own, where they cannot meet training's."""

    def __init__(self, publish: Callable[[Finished], None]) -> None:
        """Collective: creates the group. `publish` is called on rank 0, once every rank has written its part."""
        self.group = gloo_group_aside()
        self.name: str | None = None
        """The checkpoint that is being written, or was and has not been waited for."""
        self.seconds = 0.0
        self._publish = publish
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def start(self, folder: Path, copied: State, finished: Finished) -> None:
        """Collective: returns at once. What is `copied` no longer changes with training."""
        self.name, self._error = finished[0], None
        self._ended.clear()
        began = time.perf_counter()
        # One thread, and so one file: of several, torch hears of errors in one alone, and takes a checkpoint that lacks
        # the others' parts for a whole one. What is on the host need not be copied ahead.
        writer = FileSystemWriter(
            folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0, sync_files=True
        )
        future = async_save(copied, storage_writer=writer, process_group=self.group, async_stager=Copied())
        assert isinstance(future, Future)
        future.add_done_callback(partial(self._finish, finished, began))

    def wait(self) -> BaseException | None:
        """Waits for the save, and returns what went wrong on this rank."""
        self._ended.wait()
        self.name = None
        return self._error

    def _finish(self, finished: Finished, began: float, future: Future[object]) -> None:
        # The coordinator's future is done after the last rank has written, so what rank 0 publishes is whole.
        try:
            future.result()
            if dist.get_rank() == 0:
                self._publish(finished)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - a thread has nobody to raise to but `wait`
            self._error = error
        finally:
            self.seconds = time.perf_counter() - began
            self._ended.set()


class Copied(BlockingAsyncStager):
    """Copying again would let training stand still for nothing."""

    def stage(self, state_dict: State) -> State:
        return state_dict


def copy_of(state: State) -> State:
    """One copy on the host, in the place of the two or three of torch's own stager."""
    copied: State = tree_map(_copied, state)
    return copied


def _copied(value: object) -> object:
    return copied_to_host(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
