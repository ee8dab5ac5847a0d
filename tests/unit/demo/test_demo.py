import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torchtune.data import InputOutputToMessages, Message
from torchtune.datasets import SFTDataset

from tests.ranks import run_on_ranks
from torchtune_adaptive.demo.dataset import demo_dataset, demo_row
from torchtune_adaptive.demo.model import demo_model
from torchtune_adaptive.demo.tokenizer import DemoTokenizer
from torchtune_adaptive.demo.weights import generate_if_missing

ensure_weights = partial(generate_if_missing, generate=lambda: demo_model().state_dict())


@given(st.text())
def test_text_survives_encoding_and_decoding(text):
    tokenizer = DemoTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(), st.text(), st.integers(2, 60))
def test_truncated_sample_still_ends_with_eos(question, answer, limit):
    messages = [Message("user", question, masked=True), Message("assistant", answer)]
    whole, whole_mask = DemoTokenizer().tokenize_messages(messages)
    tokenizer = DemoTokenizer(max_seq_len=limit)
    tokens, mask = tokenizer.tokenize_messages(messages)
    kept = min(limit, len(whole)) - 1
    assert tokens == [*whole[:kept], tokenizer.eos_id]
    assert mask == [*whole_mask[:kept], True]


def test_prompt_stays_open_for_generation():
    tokenizer = DemoTokenizer()
    messages = [Message("user", "hi"), Message("assistant", "")]
    prompt = tokenizer({"messages": messages}, inference=True)["tokens"]
    whole = tokenizer({"messages": messages})["tokens"]
    assert whole == [*prompt, tokenizer.eot_id, tokenizer.eos_id]


@pytest.mark.parametrize("train_on_input", [False, True])
def test_samples_equal_torchtunes_dataset_over_the_same_rows(tmp_path, train_on_input):
    tokenizer = DemoTokenizer(max_seq_len=200)
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([demo_row(1, index) for index in range(40)]))
    theirs = SFTDataset(
        source="json",
        message_transform=InputOutputToMessages(train_on_input=train_on_input),
        model_transform=tokenizer,
        data_files=str(rows),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    ours = demo_dataset(tokenizer, samples=40, seed=1, train_on_input=train_on_input)
    assert [sample["tokens"] for sample in ours] == [sample["tokens"] for sample in theirs]
    assert [sample["labels"] for sample in ours] == [sample["labels"] for sample in theirs]


def start_at_once(path):
    dist.barrier()
    ensure_weights(path)


def test_concurrent_processes_leave_one_file_with_equal_bytes_that_is_never_replaced(tmp_path):
    path, random_state = tmp_path / "new" / "demo.pt", torch.get_rng_state()
    run_on_ranks(4, start_at_once, path, timeout_s=60)
    ensure_weights(tmp_path / "alone.pt")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [entry.name for entry in path.parent.iterdir()] == ["demo.pt"]
    assert path.read_bytes() == (tmp_path / "alone.pt").read_bytes()
    path.write_bytes(b"mine")
    ensure_weights(path)
    assert [each.read_bytes() for each in path.parent.iterdir()] == [b"mine"]
