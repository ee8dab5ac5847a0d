"""Each test runs its body in new processes on a GPU. On a null device, tests/null/test_gpu.py runs some of them."""

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.real_steps import fresh_processes


@pytest.fixture(scope="package", autouse=True)
def processes() -> Iterator[None]:
    with fresh_processes():
        yield


@pytest.fixture(scope="module")
def cuda() -> str:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return "cuda"
