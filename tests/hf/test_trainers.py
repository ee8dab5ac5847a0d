"""Compare each trainer with and without the mixin, with all weights and LoRA, in one process, under DDP and FSDP2.

TRL's are compared where TRL is installed, LoRA where PEFT works: it refuses the torchao that torchtune needs.
"""

from __future__ import annotations

import os
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.ranks import RankFailed, run_on_ranks

pytestmark = pytest.mark.timeout(600)
RANKS = {"one process": 1, "DDP": 2, "FSDP2": 2}
STEPS = 20


class Compared(NamedTuple):
    difference: float
    """From stock, the largest of all losses, gradient norms, weights and counters."""
    recoveries: float
    metrics: float
    """From stock, the largest difference of the metrics that TRL averages, relative to at least 1."""


def peft_works() -> bool:
    try:
        from peft.import_utils import is_torchao_available

        is_torchao_available()
    except ImportError:
        return False
    return True


def texts(columns: list[str]) -> Any:
    """Words that count up."""
    from datasets import Dataset

    drawn = random.Random(3)

    def counting() -> str:
        start = drawn.randrange(200)
        return " ".join(f"w{start + step}" for step in range(drawn.randint(3, 25))) + " "

    return Dataset.from_list([{column: counting() for column in columns} for _ in range(120)])


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{n}": n + 3 for n in range(250)}, "<unk>"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def compare(trainer: str, lora: bool, placement: str, **config_options: Any) -> dict[str, Compared]:
    """Collective: 20 steps as they are, by tokens, after two failures, and after a search."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

    from tests.hf.trainers import (
        arguments,
        difference,
        even_words,
        tiny_llama,
        tiny_reward_model,
        train,
        use_fsdp2,
    )  # fmt: skip
    from torchtune_adaptive.hf import AdaptiveArguments

    if placement == "FSDP2":
        use_fsdp2()
    generates, also = trainer in ("GRPOTrainer", "RLOOTrainer"), list[str]()

    def options(folder: Path) -> dict[str, Any]:
        """Made anew for each run."""
        adapted: dict[str, Any] = {}
        if lora:
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
            adapted = (
                {"peft_config": config} if trainer != "Trainer" else {"model": get_peft_model(tiny_llama(), config)}
            )
        if trainer == "Trainer":
            return {"arguments": arguments(folder, max_steps=STEPS), **adapted}
        import trl

        columns = {
            "SFTTrainer": ["prompt", "completion"],
            "DPOTrainer": ["prompt", "chosen", "rejected"],
            "KTOTrainer": ["prompt", "completion"],
            "RewardTrainer": ["chosen", "rejected"],
        }.get(trainer, ["prompt"])
        config, dataset = getattr(trl, trainer.replace("Trainer", "Config")), texts(columns)
        if trainer in ("DPOTrainer", "KTOTrainer") and not lora:
            adapted = {"ref_model": tiny_llama()}
        if trainer == "KTOTrainer":
            dataset = dataset.add_column("label", [number % 3 > 0 for number in range(len(dataset))])
        if trainer == "RewardTrainer":
            adapted = {"model": tiny_reward_model()}
        if generates:
            adapted |= {"reward_funcs": even_words}
        else:
            also[:] = ["num_tokens"]  # counters do not change when steps are repeated
        return {
            "base": getattr(trl, trainer),
            "arguments": arguments(
                folder, config, max_steps=STEPS, gradient_checkpointing=False, bf16=False, **config_options
            ),
            "data_collator": None,
            "processing_class": tokenizer(),
            "train_dataset": dataset,
            **adapted,
        }

    ways: dict[str, tuple[AdaptiveArguments, list[tuple[int, int]]]] = {
        "same": (AdaptiveArguments(), []),
        "tokens": (AdaptiveArguments(token_budget=120), []),
        "failed": (AdaptiveArguments(), [(2, 60), (5, 300)]),
        "searched": (AdaptiveArguments(use_maximum_batch_size=True, memory_limit="32MiB"), []),
    }
    if generates:
        del ways["searched"]
    last = RANKS[placement] - 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stock = train(folder, **options(folder))
        runs = {
            way: train(folder, adaptive, faults=faults, failing_rank=last, **options(folder))
            for way, (adaptive, faults) in ways.items()
        }
    least = 1.0 if generates else 1e-12  # advantages of about 1 whose sum is about 0
    return {
        way: Compared(
            difference(run, stock, *also, least=least), run.column("oom_recoveries")[-1], of_metrics(run.log, stock.log)
        )
        for way, run in runs.items()
    }


def of_metrics(ours: list[dict[str, float]], stock: list[dict[str, float]]) -> float:
    names = set(stock[0]) - {"step_time", "grad_norm", "loss"}
    pairs = [
        (mine[name], other[name]) for mine, other in zip(ours, stock, strict=True) for name in names & other.keys()
    ]
    return max(abs(mine - other) / max(abs(other), 1.0) for mine, other in pairs)


GENERATING: dict[str, Any] = {"num_generations": 4, "max_completion_length": 8, "temperature": 1.0}
GRPO, SFT = {**GENERATING, "loss_type": "grpo"}, {"max_length": 64}
CELLS: list[tuple[str, bool, dict[str, Any], str]] = [
    *(
        (trainer, lora, options, placement)
        for trainer, options in {"Trainer": {}, "SFTTrainer": SFT, "DPOTrainer": SFT, "GRPOTrainer": GRPO}.items()
        for lora in (False, True)
        for placement in RANKS
    ),
    ("SFTTrainer", False, {**SFT, "packing": True}, "FSDP2"),
    ("RewardTrainer", False, SFT, "DDP"),
    ("KTOTrainer", False, {**SFT, "loss_type": "apo_zero_unpaired"}, "DDP"),
    ("GRPOTrainer", False, {**GENERATING, "loss_type": "dr_grpo", "num_iterations": 2}, "one process"),
    ("GRPOTrainer", False, {**GENERATING, "loss_type": "dapo", "steps_per_generation": 6}, "DDP"),
    ("RLOOTrainer", False, {**GENERATING, "beta": 0.0}, "FSDP2"),
]


@pytest.mark.parametrize(
    ("trainer", "lora", "options", "placement"),
    CELLS,
    ids=[f"{trainer}-{'LoRA' if lora else 'whole'}-{placement}" for trainer, lora, _, placement in CELLS],
)
def test_twenty_steps_train_like_stock_however_they_are_split(
    trainer: str, lora: bool, options: dict[str, Any], placement: str
) -> None:
    if trainer != "Trainer":
        pytest.importorskip("trl")
    if lora and not peft_works():
        pytest.skip("no PEFT, or one that refuses torchao")
    function = partial(compare, **options)
    for compared in run_on_ranks(RANKS[placement], function, trainer, lora, placement, in_group=False, timeout_s=200):
        assert max(way.difference for way in compared.values()) < 1e-6, compared
        assert {way: run.recoveries for way, run in compared.items() if run.recoveries} == {"failed": 2}
        assert placement != "one process" or trainer == "GRPOTrainer" or compared["same"].difference == 0.0
        # Other microbatches than parts of a batch change what a mean over batches is.
        assert max(compared["same"].metrics, compared["failed"].metrics) < 1e-5, compared


@pytest.mark.parametrize(
    ("trainer", "options"), [("GRPOTrainer", {**GENERATING, "loss_type": "bnpo"}), ("KTOTrainer", SFT)]
)
def test_loss_that_compares_samples_is_refused_for_token_budgets(trainer: str, options: dict[str, Any]) -> None:
    pytest.importorskip("trl")
    with pytest.raises(RankFailed, match=r"neither their sum nor their mean|KTO's default loss compares samples"):
        run_on_ranks(1, partial(compare, **options), trainer, False, "one process", in_group=False, timeout_s=100)


def evaluation_losses(trainer: str, placement: str) -> list[float]:
    """Collective: the loss of an evaluation by stock and by ours, which runs out of memory on the last rank."""
    import trl

    from tests.hf.test_evaluation import out_of_memory
    from tests.hf.trainers import arguments, tiny_llama, use_fsdp2
    from torchtune_adaptive.hf import adaptive

    if placement == "FSDP2":
        use_fsdp2()
    base, config = getattr(trl, trainer), getattr(trl, trainer.replace("Trainer", "Config"))
    columns = ["prompt", "completion"] if trainer == "SFTTrainer" else ["prompt", "chosen", "rejected"]
    options: dict[str, Any] = {"gradient_checkpointing": False, "bf16": False, "max_length": 64, "max_steps": 1}
    losses, data = [], texts(columns)
    fits = 2 if trainer == "SFTTrainer" else 4  # rows, of which DPO has two per sample
    for kind, rows in (base, 1000), (adaptive(base), fits):
        with tempfile.TemporaryDirectory() as folder:
            settings = arguments(Path(folder), config, per_device_eval_batch_size=4, **options)
            reference = {"ref_model": tiny_llama()} if trainer == "DPOTrainer" else {}
            made = kind(tiny_llama(), args=settings, train_dataset=data, processing_class=tokenizer(), **reference)
            made.train()
            with out_of_memory(made.model, rank=RANKS[placement] - 1, rows=rows) as failed:
                losses.append(made.evaluate(made.train_dataset.select(range(22)))["eval_loss"])
    return [*losses, len(failed)]


@pytest.mark.parametrize("placement", ["DDP", "FSDP2"])
@pytest.mark.parametrize("trainer", ["SFTTrainer", "DPOTrainer"])
def test_evaluation_that_runs_out_of_memory_gives_the_loss_of_stock(trainer: str, placement: str) -> None:
    pytest.importorskip("trl")
    *_, (stock, ours, failed) = run_on_ranks(2, evaluation_losses, trainer, placement, in_group=False, timeout_s=100)
    assert failed
    assert abs(ours / stock - 1) < 1e-6
