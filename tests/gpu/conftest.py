"""Each test runs its body in new processes on a GPU; without one, a smaller version of some tests runs on the CPU."""

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


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        return request.getfixturevalue("cuda")
    if torch.cuda.is_available():
        pytest.skip("the GPU shows more")
    return request.param
