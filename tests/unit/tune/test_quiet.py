"""Dependencies' notices are kept away; everything else that they say still arrives."""

from __future__ import annotations

import logging

import pytest

import torchtune_adaptive.tune.quiet  # noqa: F401 - what is imported is its effect

NOTICE = (
    "Skipping import of cpp extensions due to incompatible torch version 2.13.0+cpu for torchao version 0.15.0 "
    "            Please see https://github.com/pytorch/ao/issues/2919 for more info"
)


@pytest.mark.parametrize(("text", "arrives"), [(NOTICE, False), ("This dtype is not supported on your GPU", True)])
def test_torchao_is_silent_about_its_extensions_only(
    text: str, arrives: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("torchao").warning(text)
    assert (text in caplog.messages) is arrives
