"""Each test runs its body in a process of its own, forked from one that has been on a null device from its start."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import pytest

from tests import ranks as on_ranks
from tests.ranks import run_on_ranks
from torchtune_adaptive.null_cuda import NullCudaError, environment

OnNull = Callable[..., Any]


def _preload() -> None:
    on_ranks._CONTEXT.set_forkserver_preload(["tests.null.warm"])


@pytest.fixture(scope="session")
def variables() -> dict[str, str]:
    """Puts a process of its own on a null device."""
    try:
        return environment()
    except NullCudaError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def on_null(variables: dict[str, str]) -> Iterator[OnNull]:
    """`on_null(function, *args)` returns what the function does there; with `ranks=2`, on each of two gloo ranks."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _preload) as pool:

        def run(
            function: Callable[..., Any],
            *args: Any,
            ranks: int = 1,
            in_group: bool | None = None,
            timeout_s: float = 60,
        ) -> Any:
            in_group = ranks > 1 if in_group is None else in_group
            # by CUDA's own count, torch takes every later fork for a broken one
            with mock.patch.dict(os.environ, variables, PYTORCH_NVML_BASED_CUDA_CHECK="1"):
                found = pool.submit(
                    run_on_ranks, ranks, function, *args, in_group=in_group, timeout_s=timeout_s
                ).result()
            return found if ranks > 1 else found[0]

        yield run
