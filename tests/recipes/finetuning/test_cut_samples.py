"""Samples that the tokenizer cuts are counted, on all ranks together."""

from pathlib import Path
from types import SimpleNamespace

from torchtune.datasets import TextCompletionDataset

from tests.ranks import run_on_ranks
from tests.recipes.finetuning.test_adaptive_runs import run_and_listen
from torchtune_adaptive.demo.dataset import demo_dataset
from torchtune_adaptive.demo.tokenizer import DemoTokenizer
from torchtune_adaptive.tune.checked_dataset import CheckedDataset
from torchtune_adaptive.tune.data import Data

ALLOWED, SAMPLES = 96, 64
EPOCHS = ("epochs=2", "max_steps_per_epoch=null", "batch_size=4", "gradient_accumulation_steps=2")


def run_both(folder: Path) -> list[list[str]]:
    """Collective: without and with samples that are dealt to the ranks."""
    sizes = (*EPOCHS, f"tokenizer.max_seq_len={ALLOWED}", f"dataset.samples={SAMPLES}", "adaptive.sequence_length=null")
    dealt = ("adaptive.token_budget=800", "adaptive.memory_limit=null")
    return [run_and_listen("full", folder / name, *sizes, *more) for name, more in (("as read", ()), ("dealt", dealt))]


def test_each_epoch_ends_with_one_line_that_counts_the_samples_cut_on_all_ranks(tmp_path: Path) -> None:
    whole = demo_dataset(DemoTokenizer(), samples=SAMPLES)
    cut = sum(len(whole[at]["tokens"]) >= ALLOWED for at in range(SAMPLES))
    assert 0 < cut < SAMPLES
    for lines in run_on_ranks(2, run_both, tmp_path, timeout_s=100, in_group=False)[0]:
        assert [line for line in lines if "longer samples were cut" in line] == [
            f"epoch {epoch}: {cut} of {SAMPLES} samples have {ALLOWED} tokens, the most that tokenizer.max_seq_len "
            "allows; longer samples were cut to this length"
            for epoch in (0, 1)
        ]


def test_text_completion_cuts_one_token_earlier() -> None:
    tokenizer = DemoTokenizer(ALLOWED)
    dataset = TextCompletionDataset.__new__(TextCompletionDataset)
    vars(dataset).update(_tokenizer=tokenizer, _data=[{"text": "a" * 200}], _column="text", add_eos=True)
    data = Data(CheckedDataset(dataset), False, lambda _: {}, SimpleNamespace(), tokenizer.max_seq_len)  # type: ignore[arg-type]
    assert data.truncated_length == len(dataset[0]["tokens"]) == ALLOWED - 1
