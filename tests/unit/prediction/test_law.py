"""The law: sizes that are affine in rows and in rows × tokens, and programs that follow none."""

from array import array
from typing import Any

import pytest

from torchtune_adaptive.errors import PredictionError
from torchtune_adaptive.prediction.law import fit_law, grows_faster_than_tokens, peak_of, sizes_of
from torchtune_adaptive.prediction.recorder import Allocation, Recording

SIZES = ((2, 64), (3, 64), (2, 128), (3, 128))
PHASES = {"weights": 1, "optimizer state": 2, "forward": 4, "update": 7}


def step(rows: int, tokens: int, ops: tuple[str, ...] = ("matmul", "softmax")) -> Recording:
    """Weights and state stay; one block grows with tokens, the other with rows alone and is freed first."""
    changes = [1000, 500, 7 * rows * tokens, 30 * rows + 5, -(30 * rows + 5), 11, -11]
    blocks = [
        Allocation("weights", 0),
        Allocation("state", 0),
        *(Allocation(op, 0) for op in ops),
        Allocation("update", 0),
    ]
    return Recording(tuple(blocks), array("q", [0, 1, 2, 3, 3, 4, 4]), array("q", changes), PHASES)


def law(tokens_multiple: int = 1, *, caches: bool = False):
    recordings = {size: step(*size) for size in SIZES}
    return fit_law(recordings, tokens_multiple=tokens_multiple, caches=caches)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 64), (2, 64), (17, 333), (4096, 131072)])
def test_four_recordings_give_the_sizes_of_any_other(rows: int, tokens: int) -> None:
    assert law().sizes(rows, tokens).tolist() == list(step(rows, tokens).bytes_change)


def attention(rows: int, tokens: int) -> Recording:
    """Without a kernel: scores of every token with every other, and a mask that all rows share."""
    recording = step(rows, tokens)
    scores, mask = 4 * rows * tokens**2, tokens**2
    changes = array("q", [1000, 500, 7 * rows * tokens, scores + mask, -scores - mask, 11, -11])
    return Recording(recording.blocks, recording.of_block, changes, PHASES)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 64), (5, 333), (64, 131072)])
def test_where_scores_of_attention_are_kept_a_third_length_gives_their_law(rows: int, tokens: int) -> None:
    recordings = {size: attention(*size) for size in (*SIZES, (2, 96), (3, 96))}
    curved = fit_law(recordings, tokens_multiple=1, caches=False)
    assert curved.sizes(rows, tokens).tolist() == list(attention(rows, tokens).bytes_change)


def test_two_lengths_tell_whether_a_third_is_needed() -> None:
    assert grows_faster_than_tokens({size: attention(*(64 * part for part in size)) for size in SIZES})
    assert not grows_faster_than_tokens({size: step(*(64 * part for part in size)) for size in SIZES})


@pytest.mark.parametrize("asks", [fit_law, grows_faster_than_tokens])
def test_a_program_that_grows_with_the_rows_is_refused_whatever_is_asked_first(asks: Any) -> None:
    def with_a_block_for_each(rows: int, tokens: int) -> Recording:
        recording = step(rows, tokens)
        blocks = [recording.blocks, *[(Allocation("sum", 0),)] * rows]
        of_block = [*recording.of_block, *range(5, 5 + rows)]
        changes = [*recording.bytes_change, *[4] * rows]
        return Recording(sum(blocks, ()), array("q", of_block), array("q", changes), {**PHASES, "update": 7 + rows})

    recordings = {size: with_a_block_for_each(*size) for size in SIZES}
    options = {"tokens_multiple": 1, "caches": False} if asks is fit_law else {}
    with pytest.raises(PredictionError, match=r"3 rows of 64 tokens .* \(9 and 10 events\)"):
        asks(recordings, **options)


def test_the_peak_is_found_in_every_phase() -> None:
    alive = 1500 + 7 * 5 * 100
    assert law().peak(5, 100).phase_bytes == {
        "weights": 1000,
        "optimizer state": 1500,
        "forward": alive + 155,
        "update": alive + 11,
    }


def test_which_phase_binds_may_change_with_the_rows() -> None:
    def binding(rows: int) -> str:
        peaks = law().peak(rows, 64).phase_bytes
        return max(peaks, key=lambda phase: peaks[phase])

    assert {binding(rows) for rows in range(1, 9)} == {"forward"}
    recordings = {}
    for rows, tokens in SIZES:
        changes = array("q", [1000, 500, 10 * rows * tokens, -10 * rows * tokens, 9000 + rows, 1, -1])
        program = step(rows, tokens)
        recordings[rows, tokens] = Recording(program.blocks, array("q", [0, 1, 2, 2, 3, 4, 4]), changes, PHASES)
    crossing = fit_law(recordings, tokens_multiple=1, caches=False)
    by_rows = [max(crossing.peak(rows, 64).phase_bytes.items(), key=lambda item: item[1])[0] for rows in (1, 100)]
    assert by_rows == ["update", "forward"]


def test_tokens_are_rounded_up_to_whole_chunks() -> None:
    chunked = law(tokens_multiple=8)
    assert chunked.sizes(2, 57).tolist() == chunked.sizes(2, 64).tolist()
    assert chunked.sizes(2, 65).tolist() == chunked.sizes(2, 72).tolist()


def test_a_caching_allocator_rounds_every_block_up() -> None:
    assert law(caches=True).peak(1, 1).phase_bytes["forward"] == 1024 + 512 + 512 + 512


def test_the_peak_of_a_recording_is_what_its_law_says() -> None:
    recording = step(3, 128)
    assert peak_of(PHASES, sizes_of(recording), caches=False) == law().peak(3, 128)


def test_a_program_that_does_other_things_for_other_sizes_is_refused() -> None:
    recordings = {size: step(*size) for size in SIZES}
    other = step(3, 128)
    order = array("q", [0, 1, 3, 2, 2, 4, 4])
    recordings[3, 128] = Recording(other.blocks, order, other.bytes_change, PHASES)
    with pytest.raises(PredictionError, match=r"3 rows of 128 tokens .*matmul and softmax at event 2"):
        fit_law(recordings, tokens_multiple=1, caches=False)


def test_a_program_that_goes_on_for_longer_is_refused() -> None:
    recordings = {size: step(*size) for size in SIZES}
    other = step(3, 64)
    longer = Recording(other.blocks, other.of_block[:-1], other.bytes_change[:-1], PHASES)
    recordings[3, 64] = longer
    with pytest.raises(PredictionError, match=r"7 and 6 events"):
        fit_law(recordings, tokens_multiple=1, caches=False)


def test_the_update_begins_where_the_phase_before_it_ends() -> None:
    assert step(2, 64).update_start == 4
