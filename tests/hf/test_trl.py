"""TRL's trainers with and without the mixin, in one process and under FSDP2 on two ranks. Where TRL is installed."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("trl")

from tests.ranks import run_on_ranks

pytestmark = pytest.mark.timeout(600)

Figures = dict[str, tuple[float, float]]
"""The difference from stock and the recoveries, by trainer and by what was done."""


def compare(trainer: str, ranks: int) -> Figures:
    """Collective: 6 steps as they are, by tokens, and after two failures."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    from tests.hf.trainers import arguments, difference, tiny_llama, train, use_fsdp2
    from torchtune_adaptive.hf import AdaptiveArguments

    if ranks > 1:
        use_fsdp2()
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{n}": n + 3 for n in range(250)}, "<unk>"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    drawn = random.Random(3)

    def counting() -> str:
        start = drawn.randrange(200)
        return " ".join(f"w{start + step}" for step in range(drawn.randint(3, 25))) + " "

    columns = ["prompt", "completion"] if trainer == "SFT" else ["prompt", "chosen", "rejected"]
    dataset = Dataset.from_list([{column: counting() for column in columns} for _ in range(150)])
    ways = {
        "same": (AdaptiveArguments(), []),
        "tokens": (AdaptiveArguments(token_budget=120), []),
        "failed": (AdaptiveArguments(), [(2, 60), (5, 300)]),
    }
    options = {"base": getattr(trl, f"{trainer}Trainer"), "data_collator": None, "processing_class": tokenizer}
    found: Figures = {}
    with tempfile.TemporaryDirectory() as folder:

        def run(adaptive: AdaptiveArguments | None = None, faults: list[tuple[int, int]] | None = None):  # type: ignore[no-untyped-def]
            beside = {} if trainer == "SFT" else {"ref_model": tiny_llama()}
            config = getattr(trl, f"{trainer}Config")
            chosen = arguments(Path(folder), config, max_length=64, gradient_checkpointing=False, bf16=False)
            given = {**options, **beside, "train_dataset": dataset, "arguments": chosen}
            return train(Path(folder), adaptive, faults=faults or [], failing_rank=ranks - 1, **given)

        stock = run()
        for name, (adaptive, faults) in ways.items():
            ours = run(adaptive, faults)
            # What was counted is counted once, though two steps were run again.
            found[name] = difference(ours, stock, "num_tokens"), ours.column("oom_recoveries")[-1]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("trainer", ["SFT", "DPO"])
def test_trainers_of_trl_have_the_figures_of_stock(trainer: str, ranks: int) -> None:
    for found in run_on_ranks(ranks, compare, trainer, ranks, in_group=False, timeout_s=100):
        assert max(difference for difference, _ in found.values()) < 2e-6, found
        assert [recoveries for _, recoveries in found.values()] == [0, 0, 2]
        assert ranks > 1 or found["same"][0] == 0.0
