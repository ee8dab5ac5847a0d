"""Validation between steps has the loss of a plain evaluation of the saved weights, and does not change training."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchtune import config
from torchtune.rlhf.loss import DPOLoss

from tests.ranks import run_on_ranks
from tests.recipes.comparisons import Finished
from tests.recipes.recorders import assert_same_figures, read_log
from tests.recipes.running import demo_config, run_ours
from torchtune_adaptive.objectives.preference import VALIDATION_REFERENCE_STAGE
from torchtune_adaptive.objectives.validation import VALIDATION_STAGE

EXACT = 3e-6
STEPS = "out/adaptive_steps.jsonl"
UNPADDED = ("adaptive.token_budget=400",)
AT_ONCE = ("batch_size=1", "batch_size_val=20")


class Case(NamedTuple):
    """A run that is validated on `samples` samples."""

    ranks: int
    samples: int
    overrides: tuple[str, ...] = ()
    kind: str = "full"
    limit_mib: int | None = None
    """Memory of rank 1, which suffices for training, but not for `batch_size_val` rows."""


CASES = {
    "one rank": Case(1, 9),
    "two ranks": Case(2, 11),
    "three ranks": Case(3, 10, ("batch_size_val=3",)),
    "three ranks, unpadded": Case(3, 10, UNPADDED),
    "two of three ranks": Case(3, 2),
    "padded": Case(2, 11, ("adaptive.token_budget=400", "adaptive.padding=True")),
    "packed": Case(3, 40, ("dataset_val.packed=True",)),
    "lora": Case(2, 11, kind="lora"),
    "pairs": Case(3, 10, kind="full_dpo"),
    "pairs, lora, unpadded": Case(2, 11, UNPADDED, "lora_dpo"),
    "recovered": Case(2, 40, AT_ONCE, limit_mib=14),
    "recovered, unpadded": Case(2, 40, (*AT_ONCE, "adaptive.token_budget=200"), limit_mib=10),
    "recovered, pairs": Case(2, 40, AT_ONCE, "full_dpo", limit_mib=22),
}
RECOVERED = [name for name, case in CASES.items() if case.limit_mib]
COMPARED = ["two ranks", "three ranks, unpadded", *RECOVERED]
"""Cases that are also run without validation."""


def config_of(name: str, folder: Path, *, validates: bool = True) -> DictConfig:
    case = CASES[name]
    dataset = "demo_preferences" if "dpo" in case.kind else "demo_dataset"
    limit = f"[120MiB,{case.limit_mib}MiB]" if case.limit_mib else "null"
    overrides = [
        *("batch_size=2", "max_steps_per_epoch=2", "save_every_n_steps=1", "tokenizer.max_seq_len=200"),
        *("run_val_every_n_steps=1", f"dataset_val._component_=torchtune_adaptive.demo.dataset.{dataset}"),
        *(f"dataset_val.samples={case.samples}", "dataset_val.seed=7", *case.overrides),
        *(f"adaptive.memory_limit={limit}", "adaptive.regrow_after=0"),
    ]
    return demo_config(case.kind, folder, *(each for each in overrides if validates or "_val" not in each))


def run_case(name: str, folder: Path) -> None:
    """Collective: run a case with validation and, to compare, some without it."""
    run_ours(CASES[name].kind, config_of(name, folder / "validated"))
    if name in COMPARED:
        run_ours(CASES[name].kind, config_of(name, folder / "plain", validates=False))


@pytest.fixture(scope="module", params=CASES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder, name = tmp_path_factory.mktemp("validation"), request.param
    run_on_ranks(CASES[name].ranks, run_case, name, folder, timeout_s=60, in_group=False)
    return name, folder


def logged(folder: Path, *, validations: bool) -> list[dict[str, float]]:
    return [line for line in read_log(folder / "log.jsonl") if ("val_loss" in line) == validations]


def model_with(cfg: DictConfig, file: Path) -> Any:
    """Return the stock model with weights that a run has saved."""
    section = cfg.model.copy()
    if "lora_attn_modules" in section:  # the saved weights are merged
        section = DictConfig({key: value for key, value in section.items() if "lora" not in key})
        section._component_ = section._component_.replace("lora_", "")
    model = config.instantiate(section)
    model.load_state_dict(torch.load(file, weights_only=True))
    return model.eval()


@torch.no_grad()
def losses_of(model: Any, tokens: list[int], labels: list[int], **others: Any) -> Tensor:
    """Return the loss of each token of one sample."""
    row = {name: torch.as_tensor(value)[None] for name, value in others.items()}
    logits = model(torch.tensor([list(tokens)]), **row)[0]
    return cross_entropy(logits[:-1], torch.tensor(list(labels)[1:]), reduction="none")


def plain_loss(name: str, folder: Path, weights: Path) -> dict[str, float]:
    """Evaluate the whole dataset in plain PyTorch, sample by sample."""
    cfg = config_of(name, folder)
    model, tokenizer = model_with(cfg, weights), config.instantiate(cfg.tokenizer)
    dataset = config.instantiate(cfg.dataset_val, tokenizer)
    if "dpo" in CASES[name].kind:
        return plain_preference_loss(cfg, model, dataset)
    total, tokens = 0.0, 0
    for sample in dataset:
        losses = losses_of(model, sample["tokens"], sample["labels"], **masks_of(sample))
        total += float(losses.double().sum())
        tokens += sum(int(label) != -100 for label in sample["labels"][1:])
    return {"val_loss": total / tokens}


def masks_of(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the mask and positions of a packed row."""
    if "seq_lens" not in sample:
        return {}
    blocks = [torch.ones(length, length).tril().bool() for length in sample["seq_lens"]]
    return {"mask": torch.block_diag(*blocks).bool(), "input_pos": sample["input_pos"]}


def plain_preference_loss(cfg: DictConfig, model: Any, pairs: Iterable[dict[str, Any]]) -> dict[str, float]:
    reference = model_with(cfg, Path(cfg.checkpointer.checkpoint_dir) / cfg.checkpointer.checkpoint_files[0])
    loss, total, correct, count = config.instantiate(cfg.loss), 0.0, 0, 0
    assert isinstance(loss, DPOLoss)
    for pair in pairs:
        log_probs = [
            -losses_of(each, pair[f"{answer}_input_ids"], pair[f"{answer}_labels"]).sum()[None]
            for each in (model, reference)
            for answer in ("chosen", "rejected")
        ]
        losses, chosen, rejected = loss(*log_probs)
        total, correct, count = total + float(losses), correct + int(chosen > rejected), count + 1
    return {"val_loss": total / count, "val_rewards/accuracies": correct / count}


@pytest.mark.smoke("recovered")
def test_validation_loss_is_that_of_a_plain_evaluation_of_the_saved_weights(run: tuple[str, Path]) -> None:
    name, folder = run[0], run[1] / "validated"
    found = logged(folder, validations=True)
    assert [line["step"] for line in found] == [1, 2]
    for line, saved in zip(found, ("step_1", "epoch_0"), strict=True):
        expected = plain_loss(name, folder, folder / "out" / saved / "model-00001-of-00001.bin")
        assert {key: line[key] for key in expected} == pytest.approx(expected, rel=EXACT), saved


@pytest.mark.parametrize("run", COMPARED, indirect=True)
def test_training_is_bitwise_that_of_a_run_without_validation(run: tuple[str, Path]) -> None:
    folders = [run[1] / name for name in ("plain", "validated")]
    plain, validated = (logged(folder, validations=False) for folder in folders)
    assert_same_figures(validated, plain, ("loss", "grad_norm", "microbatches", "oom_recoveries"))
    one_weights, other_weights = (Finished(folder).weights() for folder in folders)
    assert [key for key in one_weights if not torch.equal(one_weights[key], other_weights[key])] == []
    peaks = [[step.get("peak_bytes", 0) for step in read_log(folder / STEPS)] for folder in folders]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)


@pytest.mark.parametrize("run", RECOVERED, indirect=True)
def test_validation_recovers_on_its_own_and_is_named_in_the_record(run: tuple[str, Path]) -> None:
    name, folder = run[0], run[1] / "validated"
    of_pairs = [VALIDATION_REFERENCE_STAGE] if CASES[name].kind == "full_dpo" else []
    recoveries = Finished(folder).events("recovery")
    assert {event["stage"] for event in recoveries} == {VALIDATION_STAGE, *of_pairs}
    assert {tuple(event["ranks"]) for event in recoveries} == {(1,)}
    events, found = Finished(folder).events("validation"), logged(folder, validations=True)
    assert [(each["step"], each["val_loss"]) for each in events] == [(each["step"], each["val_loss"]) for each in found]
