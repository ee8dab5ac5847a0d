"""Values that scripts read from a GPU: known ones are correct, and unknown ones are guessed and reported."""

import re
from textwrap import dedent

import pytest

from tests.conftest import Rehearse
from tests.scripts import ONE_STEP, lines_of, marked


def test_host_values_are_read_and_values_computed_on_the_card_are_guessed_and_reported(
    rehearse: Rehearse,
) -> None:
    script = """
        import torch

        model = torch.nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            lengths = torch.tensor([3, 37], device="cuda")
            assert (lengths[1].item(), lengths.tolist()) == (37, [3, 37])
            assert (torch.arange(100) < 7).cuda().nonzero().shape == (7, 1)
            experts = torch.randint(0, 8, (4096,), device="cuda")
            chosen = (experts != 3).nonzero()  # guessed
            assert chosen.shape == (4096, 1)
            rows = max(1, experts.max().item())  # guessed
            del lengths, chosen  # a new tensor at this address must not get the old values
            ones = torch.empty(4096, dtype=torch.long, device="cuda")
            assert torch.bincount(ones, minlength=8).tolist() == [0] * 8  # guessed
            tokens = torch.full((2**22,), 0x7F8000007F800000).cuda()
            del tokens  # as floats these are infinite
            assert torch.empty(2**23, device="cuda").cpu().sum() == 0
            out = model(torch.zeros(rows, 1024, device="cuda"))
            out.register_hook(lambda gradient: gradient * (not torch.isnan(gradient).any()))
            out[out > 0].sum().backward()  # guessed
            optimizer.step()
        torch.save(optimizer.state_dict(), "state.pt")
        optimizer.load_state_dict(torch.load("state.pt", map_location="cuda"))
        optimizer.step()
    """
    answer = rehearse(script, status=0)
    assert sorted(lines_of(answer.found["places_read"])) == marked(script)


@pytest.mark.smoke
def test_values_changed_or_made_unique_on_the_card_are_guessed(rehearse: Rehearse) -> None:
    script = """
        import torch

        def size(value):
            return value

        left, kept = torch.tensor(3).cuda(), (torch.arange(100) < 7).cuda()
        same, repeated = torch.tensor([5, 6]).cuda(), torch.tensor([1, 1, 2]).cuda()
        assert same[1:].item() == 6
        assert repeated.unique().tolist() == [1, 2]
        kept[torch.arange(10, device="cuda")] = True
        same[1] = 9
        repeated.add_(1)
        while left.item() > 0:
            left -= 1
        print(kept.nonzero().shape[0])
        print(size(same.tolist()), size(same[1].item()))
        repeated.remainder_(7)
        assert repeated.unique().tolist() == [2, 3]
        padded, ids = torch.zeros(2, 4, dtype=torch.long).cuda(), torch.tensor([[1, 2], [3, 4]])
        assert ids.cuda().clone().tolist() == ids.tolist()
        padded[:, :2].copy_(ids)
        assert padded.tolist() == [[1, 2, 0, 0], [3, 4, 0, 0]]
        assert ids.cuda()[:, 1].clone().view(2, -1).tolist() == [[2], [4]]
        padded[0, 0] = torch.randint(9, (), device="cuda")
        assert padded[1].tolist() == [3, 4, 0, 0]
        print(size(padded.tolist()))  # guessed
        with torch.inference_mode():
            kept = torch.tensor([True, False]).cuda()
            kept.logical_not_()
            assert kept.nonzero().tolist() == [[1]]
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP), status=0)
    assert answer.printed.startswith("10\n[5, 9] 9\n")
    assert lines_of(answer.found["places_read"]) == marked(script)


def test_values_computed_on_the_card_are_guessed_on_the_host_too(rehearse: Rehearse) -> None:
    script = """
        import torch

        def size(value):
            return value

        rows, shown = torch.randint(1, 9, (8, 1024), device="cuda"), []
        shown += rows.sum(1).tolist()  # guessed
        shown.append(int(rows.sum(1).cpu().sum()))  # guessed
        shown.append((torch.rand(64, device="cuda") < 8).cpu().sum().item())
        for _ in range(2):  # the second reuses the address of a number
            scores = torch.randn(64, device="cuda")
            shown.append((scores > -1).to("cpu").sum().item())  # guessed
            del scores
        shown.append(int(torch.ones(8, 8).cuda().sum()))
        lengths = torch.tensor([3, 4]).cuda()
        rows = torch.tensor([5, 6, 7]).cuda().clone()
        del rows
        shown.append(torch.randint(1, 9, (8,), device="cuda").sum().item())  # guessed
        shown += torch.repeat_interleave(torch.zeros(2, 5, device="cuda"), lengths, dim=0).shape
        for create in torch.tensor, torch.as_tensor:
            assert torch.topk(input=create(data=[5.0, 6.0]).cuda(), k=1).indices.tolist() == [1]
        print(size(shown), lengths.cpu().tolist(), torch.tensor([True, False]).cuda().tolist(), flush=True)
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP))
    expected = [*[1024] * 8, 8192, 64, 64, 64, 64, 8, 7, 5]
    assert answer.printed.startswith(f"{expected} [3, 4] [True, False]\n"), answer.printed
    assert lines_of(answer.found["places_read"]) == marked(script)


def test_integers_that_the_user_states_are_read_and_no_longer_guessed(rehearse: Rehearse) -> None:
    script = """
        import torch

        labels, answers = torch.randint(0, 10, (64,), device="cuda"), torch.randn(64, 10, device="cuda")
        rows = labels.max().item()  # guessed
        columns = int(answers.sum())  # guessed
        kinds = labels.unique().numel()  # guessed
        first, *_ = answers.argmax(-1).tolist()  # guessed
        print(rows, columns, kinds, first, flush=True)
        torch.zeros(rows, 2**20, device="cuda")
    """
    script = dedent(script) + dedent(ONE_STEP)
    guessed, at = rehearse(script), marked(script)
    assert guessed.printed.startswith("0 0 1 0\n")
    assert lines_of(guessed.found["places_read"])[:4] == at
    assert guessed.found["guesses"] == [f"train.py:{at[0]}"]
    stated = [f"--fixed=train.py:{line}={number}" for line, number in zip(at, (512, 3, 7, 9), strict=True)]
    fixed = rehearse(script, *stated)
    assert fixed.printed.startswith("512 3 7 9\n")
    assert fixed.found["guesses"] == []
    assert fixed.found["rank_peaks"][0]["allocated_bytes"] >= 2**31 > guessed.found["rank_peaks"][0]["allocated_bytes"]
    assert "guessed" not in fixed.found["verdict"]
    text = rehearse(script, *stated[1:], "--fixed", "train.py:1=9", json_format=False).found
    assert "--fixed train.py:1=N has no effect: this line reads no unknown value" in text
    assert text.count("has no effect") == 1
    assert f"with random values at train.py:{at[0]}: " in text


PRINTED = """
    import torch

    def has_overflow():  # as in DeepSpeed's ZeRO
        return bool(torch.randint(2, (1,), dtype=torch.uint8, device="cuda").byte().to("cuda")[0].item())

    has_overflow()
    answers = torch.zeros(64, 10, device="cuda")
    print(answers, answers.argmax(-1), answers > 0, f"{answers.argmax()} {torch.ones(()).cuda() + 1:.3f}")
"""

DOCUMENT_MASK = """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    documents = (torch.arange(512) // 100).cuda()

    def same_document(batch, head, query, key):
        return (query >= key) & (documents[query] == documents[key])

    mask = create_block_mask(same_document, 1, None, 512, 512, device="cuda")
    assert mask.kv_indices.shape == (1, 1, 4, 4)
"""

COMPILED_MASK = """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    positions = torch.arange(512, device="cuda")
    create = torch.compile(create_block_mask, fullgraph=True)
    create(lambda batch, head, query, key: positions[query] >= positions[key], 1, None, 512, 512, device="cuda")
"""
"""Dynamo finds out once, in a torch function mode, which function of torch each operator calls."""


@pytest.mark.parametrize(
    "script", [PRINTED, DOCUMENT_MASK, COMPILED_MASK], ids=["printed or checked", "document mask", "compiled mask"]
)
def test_values_that_are_known_or_decide_nothing_are_not_reported(rehearse: Rehearse, script: str) -> None:
    assert rehearse(dedent(script) + dedent(ONE_STEP), status=0).found["guesses"] == []


@pytest.mark.parametrize(
    ("body", "options", "status", "expected"),
    [
        ("kept = torch.ones(2**40, device='cuda')", (), 1, "guessed values were read at train.py:4: with others"),
        (
            "break",
            ("--timeout", "20"),
            2,
            "the last guessed value was read at train.py:4 (to state it",
        ),
    ],
    ids=["out of memory", "timeout"],
)
def test_read_before_memory_or_time_ran_out_is_named(
    rehearse: Rehearse, body: str, options: tuple[str, ...], status: int, expected: str
) -> None:
    script = f"""
    import torch
    while True:
        if torch.rand(1, device="cuda").item() {"<" if options == () else ">"} 0.5:
            {body}
    """
    answer = rehearse(script, *options, json_format=False)
    assert (answer.status, expected in answer.found) == (status, True), answer.found


def test_generation_without_known_tokens_ends_at_its_limit(rehearse: Rehearse) -> None:
    """Also if a script calls transformers' `generate` in inference mode, in which torch counts no versions."""
    script = """
        import torch

        end = torch.tensor([2], device="cuda")

        def drawn():
            return torch.isin(torch.randint(0, 9, (4,), device="cuda"), end)

        def generate(length=0):
            running = torch.ones(4, dtype=torch.long, device="cuda")
            while length < 20:
                length += 1
                done = torch.full((4,), False, device="cuda") | torch.full((4,), length >= 7, device="cuda")
                running = running & ~(done | drawn())
                if running.max() == 0:
                    break
            return length

        done = torch.zeros(4, dtype=torch.bool, device="cuda")
        for first in range(1, 8):
            done |= drawn()
            if done.all():
                break
        with torch.inference_mode():
            inside = generate()
        with torch.device("cuda"):
            assert torch.ones(4).is_cuda
        if not (torch.isfinite(torch.zeros(4, device="cuda")).all() and (drawn() == (end > 0)).all()):
            raise ValueError("checks are true")
        print("tokens", first, generate(), inside)
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP))
    assert answer.printed.startswith("tokens 7 7 7\n"), answer.printed
    assert set(answer.found["guesses"]) <= {"train.py:15", "train.py:22"}  # it may end earlier
    assert "guessed" not in answer.found["verdict"]


def test_counts_and_comparisons_of_host_values_are_known(rehearse: Rehearse) -> None:
    script = """
        import torch
        from transformers.trainer_pt_utils import nested_numpify

        for step in range(2):
            labels = torch.arange(40).view(4, 10)
            labels[:, step + 1:] = -100
            labels, lengths = labels.cuda(), torch.tensor([3, 5, 2]).cuda()
            assert (labels != -100).sum().item() == 4 * (step + 1)
            assert (labels[..., 1:] != -100).sum().item() == 4 * step
            assert (lengths.max().item(), torch.sum(lengths > 2).item(), int(lengths.bool().sum())) == (5, 2, 3)
            assert labels[:, 0].tolist() == labels.t()[0].cpu().tolist() == [0, 10, 20, 30]
            assert lengths[lengths > 2].shape == (2,)
            assert ((lengths > 2) & (lengths < 5)).nonzero().tolist() == [[0]]
            assert not torch.equal(lengths, lengths.flip(0))
            assert torch.corrcoef(torch.stack([lengths, -lengths]).float())[0, 1].item() < -0.99
            lengths.remainder_(4)
            assert lengths.tolist() == [3, 1, 2]
            assert (2**lengths).tolist() == [8, 2, 4]
            lengths.mul_(torch.randint(1, 9, (1,), device="cuda"))
            range(lengths.max().item())  # guessed
            nested_numpify(lengths)  # as Trainer does, to compute metrics
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP), status=0)
    assert lines_of(answer.found["places_read"]) == marked(script)


def test_arithmetic_on_integers_of_the_host_gives_sizes_and_masks(rehearse: Rehearse) -> None:
    """As vision models compute the patches of each image and the places of their tokens."""
    script = """
        import torch
        from torch.nn.functional import pad

        grids = torch.tensor([[1, 28, 28], [2, 14, 14]]).cuda()
        assert (grids.prod(-1) // 4).tolist() == [196, 98]
        assert list(range(0, ((grids != 14).sum() / 3).ceil().to(torch.int64) * 3, 3)) == [0, 3]
        patches = torch.repeat_interleave(grids[:, 1] * grids[:, 2], grids[:, 0])
        ends = pad(patches.cumsum(0, dtype=torch.int32), (1, 0))
        assert (ends[1:] - ends[:-1]).tolist() == [784, 196, 196]
        rows = torch.arange(4, device="cuda")[:, None].expand(4, 3).reshape(2, 2, 3)  # a view
        assert rows.transpose(0, 1).reshape(-1).tolist() == [0, 0, 0, 2, 2, 2, 1, 1, 1, 3, 3, 3]
        frames, ones = torch.div(patches - 4, 2, rounding_mode="floor") + 1, torch.ones(3, dtype=torch.long).cuda()
        torch.nn.functional.ctc_loss(torch.zeros(391, 3, 8, device="cuda"), torch.ones(3, 1).cuda(), frames, ones)
        assert frames.tolist() == [391, 97, 97]
        assert torch.cat([patches, 1 + patches]).tolist() == [784, 196, 196, 785, 197, 197]
        counts = torch.zeros(4, dtype=torch.long, device="cuda")
        counts[1] = 5
        counts[2:] += 2
        assert counts.tolist() == [0, 5, 2, 2] and counts.max().item() == 5
        assert counts.fill_(3).mul_(2).tolist() == [6] * 4
        counts[0] = patches.float().sum().long()
        assert counts.tolist() == [1176, 6, 6, 6]
        counts[0] = (torch.rand(2, device="cuda") * 4).long().sum()
        range(counts[0].item())  # guessed
        assert counts[1:].tolist() == [6, 6, 6]
        mask = torch.arange(8, device="cuda") < torch.tensor([3, 5]).cuda()[:, None]
        assert torch.zeros(2, 8, device="cuda")[mask].shape == (8,)
        hidden = torch.randn(2, 8, 4, device="cuda", requires_grad=True)
        assert hidden.masked_select(mask[..., None]).shape == (32,)
        images = torch.randn(8, 4, device="cuda", requires_grad=True)
        hidden.masked_scatter(mask[..., None], images).sum().backward()
        assert images.grad.shape == (8, 4)
        range((patches + (images[0, 0] > 0)).max().item())  # guessed
        hidden.masked_select(hidden > 0)  # guessed
        images = torch.zeros(64, device="cuda", requires_grad=True)
        hidden.masked_scatter(hidden > 0, images).sum().backward()  # guessed
    """
    answer = rehearse(dedent(script) + dedent(ONE_STEP), status=0)
    assert lines_of(answer.found["places_read"]) == marked(script)


SIZED = """
    import torch

    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    for step in range(2):
        share = torch.rand(1, device="cuda")
        noise = torch.rand(1, device="cuda").item()
        rows = int(2**19 * share.item())
        print(torch.rand(1, device="cuda").item())
        layer(torch.ones(rows + 1, 1024, device="cuda")).sum().backward()
        optimizer.step()
"""


@pytest.mark.smoke
def test_script_that_fits_with_some_values_only_has_no_answer_until_the_value_is_stated(rehearse: Rehearse) -> None:
    answer = rehearse(SIZED, "--memory", "4GiB")
    assert (answer.status, answer.found["guesses"]) == (2, ["train.py:9"])
    assert "runs out of memory with random values at train.py:9" in answer.found["verdict"]
    stated = rehearse(SIZED, "--memory", "4GiB", "--fixed", "train.py:9=0.25")
    assert (stated.status, stated.found["guesses"]) == (0, [])
    assert stated.found["steps"][-1]["allocated_bytes"] > 2 * 2**17 * 1024 * 4


@pytest.mark.parametrize(
    ("rows", "least"),
    [
        ("int((torch.randn((), device='cuda') * 100).clamp(16, 2**18))", r"0\.\d\d"),
        ("len((torch.randn(2**18, device='cuda') > 3).nonzero())", r"1\.\d\d"),
    ],
    ids=["clamp", "mask"],
)
def test_verdict_has_the_least_and_the_most_memory_that_a_value_within_bounds_needs(
    rehearse: Rehearse, rows: str, least: str
) -> None:
    script = f"""
    import torch

    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    for step in range(2):
        rows = {rows}
        layer(torch.ones(rows, 1024, device="cuda")).sum().backward()
        optimizer.step()
    """
    verdict = rehearse(script, status=0).found["verdict"]
    assert re.search(rf"at train.py:7 \({least} to 2\.\d\d GiB, see below\)", verdict), verdict


@pytest.mark.parametrize(
    ("read", "options"),
    [
        ("rows, more = 1024, x[torch.rand(2**23, device='cuda') > 0.5]", ()),
        ("rows, more = 1024, x.cpu()[(torch.rand(2**23, device='cuda') > 0.5).cpu()].cuda()", ()),
        ("rows, more = 8 * share.item(), int(2**18 * share.square().item())", ("--fixed", "train.py:9=1")),
    ],
    ids=["large mask", "large mask on the host", "a stated value and another"],
)
def test_unknown_number_of_elements_is_named(rehearse: Rehearse, read: str, options: tuple[str, ...]) -> None:
    script = f"""
    import torch

    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    x = torch.zeros(2**23, device="cuda")
    for step in range(2):
        share = torch.rand((), device="cuda")
        {read}
        more = torch.zeros(more, 64, device="cuda") if isinstance(more, int) else [more.clone() for _ in range(8)]
        layer(torch.ones(int(rows) + 8, 1024, device="cuda")).sum().backward()
        optimizer.step()
    """
    assert rehearse(script, *options, status=0).found["guesses"] == ["train.py:9"]


def test_line_that_decides_is_named_although_a_later_line_reads_a_number_to_print_it(rehearse: Rehearse) -> None:
    script = """
    import torch

    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    for step in range(2):
        rows = 8 if torch.rand(1, device="cuda").item() > 0.5 else 2**18
        print(torch.rand(1, device="cuda").item())
        layer(torch.ones(rows, 1024, device="cuda")).sum().backward()
        optimizer.step()
    """
    assert rehearse(script, status=0).found["guesses"] == ["train.py:7"]


def test_error_with_random_values_only_is_no_failure_of_the_script(rehearse: Rehearse) -> None:
    script = """
    import torch

    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    lengths = [64, 128]
    for step in range(12):
        accepted = torch.randn(4, device="cuda").long().sum().item()  # at most 1 in training
        layer(torch.ones(lengths[accepted], 1024, device="cuda")).sum().backward()
        optimizer.step()
    """
    found = rehearse(script, "--steps", "0", status=0).found
    assert "other values at train.py:8 end in an error, so they were not tried" in found["verdict"]


def test_lbfgs_keeps_as_many_directions_as_it_may(rehearse: Rehearse) -> None:
    script = """
    import torch

    layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda")
    optimizer = torch.optim.LBFGS(layer.parameters(), history_size=40)

    def closure():
        optimizer.zero_grad()
        loss = layer(torch.randn(64, 1024, device="cuda")).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    """
    found = rehearse(script, status=0).found
    assert found["rank_peaks"][0]["allocated_bytes"] > 2 * 40 * 4 * 1024**2
    assert found["guesses"] == []


def test_size_that_depends_on_time_is_named(rehearse: Rehearse) -> None:
    script = """
    import torch

    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    for step in range(2):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        for event in events:
            event.record()
        torch.cuda.synchronize()
        first, second = events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])
        layer(torch.ones(1024 if second < first else 512, 1024, device="cuda")).sum().backward()
        optimizer.step()
    """
    answer = rehearse(script, status=0)
    assert answer.found["guesses"] == ["train.py:11"]


def test_script_that_takes_more_steps_with_other_values_is_named(rehearse: Rehearse) -> None:
    script = """
    import torch

    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    best = float("inf")
    for step in range(8):
        layer(torch.ones(64, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.rand(1, device="cuda").item()
        if loss >= best:
            print("no longer better")
            break
        best = loss
    """
    answer = rehearse(script, status=0)
    assert len(answer.found["steps"]) == 2
    assert "the number of steps depends on a guessed value at train.py:11" in answer.found["verdict"]


def test_script_that_finds_its_own_files_is_not_compared_with_itself(rehearse: Rehearse) -> None:
    script = """
    import os
    import torch

    layer = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters())
    rows = 4096 if os.path.exists("saved") else 512
    layer(torch.ones(rows, 1024, device="cuda")).sum().backward()
    optimizer.step()
    open("saved", "w").write("high" if layer.weight.sum().item() > 1 else "low")
    """
    answer = rehearse(script, json_format=False, status=0)
    assert "does the script find files that it has written?" in answer.found


PRELUDE = """
    import torch

    layer = torch.nn.Linear(256, 256, device="cuda")
    sparse = torch.eye(256).to_sparse().cuda()
    optimizer = torch.optim.SGD(layer.parameters())
    for step in range(2):
        x = layer(torch.randn(64, 256, device="cuda"))
"""

FINITE = """
        if torch.isnan(x).any() or not torch.isfinite(x).all() or torch.isinf(x).sum() > 0:
            raise SystemExit("not finite")
        with torch.amp.autocast("cuda", dtype=torch.float16):
            loss = layer(x).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        plateau.step(loss)
        print(f"loss {loss.item():.3f}, mean {sum([loss.item()]) / 1:.2f}, at most {max(0.0, loss.item())}")
        optimizer.zero_grad()
        losses.append(loss.item())
        assert math.isfinite(float(loss))
        print(f"mean {np.mean(losses)}, perplexity {round(math.exp(float(loss)), 2)}")
        for at, value in enumerate(x.detach().float().cpu().numpy()):
            if at % 32 == 0:
                print(value.mean())
"""


def test_checks_and_logs_have_no_warning(rehearse: Rehearse) -> None:
    setup = """
    import math
    import numpy as np
    losses = []
    scaler = torch.amp.GradScaler("cuda")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
"""
    answer = rehearse(PRELUDE.replace("    for step", f"{setup}    for step") + FINITE, status=0)
    assert answer.found["guesses"] == []


def test_mask_with_one_element_on_the_host_selects_it(rehearse: Rehearse) -> None:
    script = """
        import torch

        model = torch.nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            keep = model(torch.randn(1, 1024, device="cuda")).mean(1).cpu() > 0.5
            model(torch.randn(1, 32768, 1024, device="cuda")[keep]).sum().backward()
            optimizer.step()
    """
    answer = rehearse(script)
    assert answer.found["rank_peaks"][0]["allocated_bytes"] > 2 * 32768 * 1024 * 4
