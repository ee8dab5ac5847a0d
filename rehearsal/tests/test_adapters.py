"""Adapters of a package that the script imports: entry points on the path, as an installed package has them."""

from pathlib import Path
from textwrap import dedent

import pytest

from tests.conftest import Rehearse

SCRIPT = """
    import torch
    try:
        from pkg import rows
    except ImportError:
        def rows():
            return 1

    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        model(torch.zeros(rows(), 1024, device="cuda")).sum().backward()
        optimizer.step()
"""
WORKS = """
    def adapt(rehearsal):
        import pkg

        rehearsal.replace({pkg.rows: lambda: 64})
        rehearsal.record("search", {"stage": "", "text": "searched", "result": {"rows": 64}})
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the adapter of a package `pkg`, whose function waits for other ranks."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("def rows():\n    raise RuntimeError('waits for other ranks')\n")
    about = tmp_path / "pkg-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[gpu_rehearsal.adapters]\npkg = pkg.adapter:adapt\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "pkg" / "adapter.py"


@pytest.mark.smoke
def test_adapter_replaces_a_function_and_adds_to_the_report(rehearse: Rehearse, package: Path) -> None:
    package.write_text(dedent(WORKS))
    found = rehearse(SCRIPT, "--once", status=0).found
    assert [search["text"] for search in found["searches"]] == ["searched"]


@pytest.mark.parametrize(
    ("adapter", "error"),
    [
        ("def adapt():\n    pass\n", "TypeError: adapt() takes 0 positional arguments but 1 was given"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
    ids=["signature", "import"],
)
def test_failed_adapter_is_named_and_no_script_can_catch_its_error(
    rehearse: Rehearse, package: Path, adapter: str, error: str
) -> None:
    package.write_text(adapter)
    verdict = rehearse(SCRIPT, status=2).found["verdict"]
    assert verdict.startswith(f"no answer: the adapter of pkg, pkg.adapter:adapt, failed ({error}): correct it")


def test_data_that_no_adapter_replaces_is_an_error(rehearse: Rehearse, package: Path) -> None:
    package.write_text(dedent(WORKS))
    verdict = rehearse(SCRIPT, "--without-data", status=2).found["verdict"]
    assert "--without-data needs a script of a package whose adapter replaces the data" in verdict
