"""A run takes the answer of a search that an earlier version has written (tests/unit/record/earlier)."""

import json
from pathlib import Path

import pytest
import torch

from tests.recipes.recording import read_log
from tests.recipes.running import demo_config, load_ours

EARLIER = Path(__file__).parents[2] / "unit" / "record" / "earlier"
REUSING = ("adaptive.memory_limit=40MiB", "adaptive.reuse_search=True")


@pytest.mark.parametrize(
    ("name", "overrides", "reason"),
    [
        (
            "rows",
            ("use_maximum_batch_size=True", "adaptive.sequence_length=256"),
            "batch search: 4 rows of 256 tokens (4.7 fit, rounded down to a power of two), as found before",
        ),
        (
            "lengths",
            (
                "adaptive.token_budget=auto",
                "adaptive.padding=True",
                "batch_size=32",
            ),  # 64 rows a step: no more are probed
            "token budget: any length fits up to 1224 tokens, or as many as the surfaces say, as found before",
        ),
    ],
)
def test_a_search_of_an_earlier_version_is_not_made_again(
    name: str, overrides: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    output = tmp_path / name / "out"
    output.mkdir(parents=True)
    record = json.loads((EARLIER / name / "batch_search.json").read_text(encoding="utf-8"))
    record["fingerprint"]["torch"] = torch.__version__
    (output / "batch_search.json").write_text(json.dumps(record), encoding="utf-8")
    recipe = load_ours("full")(demo_config("full", tmp_path / name, *overrides, *REUSING))
    recipe.setup()
    recipe.cleanup()
    events = read_log(output / "adaptive_events.jsonl")
    assert [event["reason"] for event in events if event["kind"] == "search"] == [reason]
