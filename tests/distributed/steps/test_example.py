import re
import sys
from pathlib import Path

import pytest

from tests.forked_commands import run_forked

ROOT = Path(__file__).parents[3]


def output_of(example: str, *options: str, ranks: int = 2) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    run = run_forked([*launcher, f"examples/{example}", *options], cwd=ROOT, timeout_s=120)
    assert run.status == 0, run.output
    return run.output


def check_recovery(output: str, recovery: str, steps: int) -> None:
    assert re.search(recovery, output)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert len(losses) == steps
    assert losses[-1] < losses[0]


@pytest.mark.smoke
def test_plain_fsdp2_example_recovers_with_less_memory_on_one_rank():
    recovery = r"step 1: out of memory on rank 1 .*microbatch 16 -> 8 rows, step repeated"
    check_recovery(output_of("plain_fsdp2.py"), recovery, steps=8)


def test_example_with_torchtitan_recovers_with_less_memory_on_one_rank() -> None:
    pytest.importorskip(
        "torchtitan", reason="needs torchtitan 0.3.0, which is not a dependency: see docs/torchtitan.md"
    )
    recovery = r"step \d: out of memory on rank 3 .*microbatch 8 -> 4 rows, step repeated"
    check_recovery(output_of("torchtitan_models.py", "llama", ranks=4), recovery, steps=6)


def test_batch_size_example_trains_with_the_size_it_found():
    output = output_of("find_batch_size.py")
    assert re.search(r"batch search · linear · 64 tokens · budget 23\.8 MiB a rank", output)
    assert re.search(r"^  8 .*<- chosen \(.* fit, rounded down to a power of two; .*\)$", output, re.MULTILINE)
    assert re.findall(r"step (\d): .*, 8 rows, out of memory 0 times", output) == ["1", "2", "3"]


def test_hugging_face_example_finds_its_size_and_recovers():
    pytest.importorskip("transformers")
    output = output_of("transformers_fsdp2.py")
    assert re.search(r"^  8 .*<- chosen \(.* fit, rounded down to a power of two; .*\)$", output, re.MULTILINE)
    assert re.findall(r"out of memory on .*", output) == [
        "out of memory on rank 1 (longest sample 62 tokens): microbatch 8 -> 4 rows, step repeated"
    ]
    assert re.findall(r"step (\d): .* at most (\d) rows, recoveries: (\d)", output) == [
        (str(step), "8" if step < 3 else "4", str(int(step == 3))) for step in range(1, 7)
    ]
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    assert losses == sorted(losses, reverse=True)


def test_library_page_shows_the_example():
    assert (ROOT / "examples" / "plain_fsdp2.py").read_text() in (ROOT / "docs" / "library.md").read_text()
