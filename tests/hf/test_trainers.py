"""Compare each trainer with and without the mixin, with all weights and LoRA, in one process, under DDP and FSDP2.

TRL's are compared where TRL is installed, LoRA where PEFT works: it refuses the torchao that torchtune needs.
"""

from __future__ import annotations

import re
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.captured_logs import captured_log
from tests.hf.test_evaluation import out_of_memory
from tests.hf.trainers import (
    RANKS,
    Run,
    arguments,
    difference,
    of_metrics,
    on_ranks_of_placement,
    tiny_llama,
    train,
    trl_options,
    use_fsdp2,
)
from tests.ranks import RankFailed, run_on_ranks
from torchtune_adaptive.engine.ranks import from_all_ranks, rank
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.hf import AdaptiveArguments, adaptive

pytestmark = pytest.mark.timeout(1800)
STEPS = 20
WAYS: dict[str, tuple[AdaptiveArguments, list[tuple[int, int]]]] = {
    "same": (AdaptiveArguments(), []),
    "tokens": (AdaptiveArguments(token_budget=120), []),
    "failed": (AdaptiveArguments(), [(2, 60), (5, 300)]),
    "searched": (AdaptiveArguments(use_maximum_batch_size=True, memory_limit="32MiB"), []),
}


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


needs_trl = pytest.mark.skipif(not find_spec("trl"), reason="needs TRL")


def options(trainer: str, folder: Path, lora: bool, config_options: dict[str, Any]) -> dict[str, Any]:
    """Collective: arguments of `train`, made anew for each run."""
    if trainer != "Trainer":
        return trl_options(trainer, folder, lora=lora, max_steps=STEPS, **config_options)
    given: dict[str, Any] = {"arguments": arguments(folder, max_steps=STEPS)}
    if lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
        given["model"] = get_peft_model(tiny_llama(), config)
    return given


def compare(trainer: str, lora: bool, placement: str, **config_options: Any) -> dict[str, Compared]:
    """Collective: 20 steps as they are, by tokens, after two failures, and after a search."""
    if placement == "FSDP2":
        use_fsdp2()
    generates, last = trainer in ("GRPOTrainer", "RLOOTrainer"), RANKS[placement] - 1
    # counters do not change when steps are repeated
    counters = [] if generates or trainer == "Trainer" else ["num_tokens"]
    least = 1.0 if generates else 1e-12  # advantages of about 1 whose sum is about 0
    compared = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stock = train(folder, **options(trainer, folder, lora, config_options))
        for way, (limits, faults) in WAYS.items():
            # microbatches of several batches have one mean over tokens, instead of one for each batch
            if (generates and way == "searched") or (way == "tokens" and config_options.get("loss_type") == "bnpo"):
                continue
            given = options(trainer, folder, lora, config_options)
            run = train(folder, limits, faults=faults, failing_rank=last, **given)
            differs = difference(run, stock, *counters, least=least)
            compared[way] = Compared(differs, run.column("oom_recoveries")[-1], of_metrics(run.log, stock.log))
    return compared


GENERATING: dict[str, Any] = {"num_generations": 4, "max_completion_length": 8, "temperature": 1.0}
CLIPPED = {"num_iterations": 2, "epsilon": 1e-5}
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
    ("GRPOTrainer", False, {**GRPO, **CLIPPED, "importance_sampling_level": "sequence"}, "DDP"),
    ("GRPOTrainer", False, {**GENERATING, "loss_type": "bnpo"}, "FSDP2"),
    ("RLOOTrainer", False, {**GENERATING, **CLIPPED, "beta": 0.0}, "FSDP2"),
]


@pytest.mark.smoke("Trainer-whole-FSDP2")
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


@needs_trl
@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        ("KTOTrainer", SFT),
        ("DPOTrainer", {**SFT, "loss_type": "aot"}),
        ("DPOTrainer", {**SFT, "loss_type": ["sigmoid", "sft"]}),
    ],
)
def test_loss_that_compares_samples_is_refused_for_token_budgets(trainer: str, options: dict[str, Any]) -> None:
    with pytest.raises(
        RankFailed,
        match=r"neither their sum nor their mean|default loss compares samples|sorts the samples|is a mean over tokens",
    ):
        run_on_ranks(1, partial(compare, **options), trainer, False, "one process", in_group=False, timeout_s=100)


@needs_trl
@pytest.mark.parametrize("placement", ["DDP", "FSDP2"])
@pytest.mark.parametrize("trainer", ["SFTTrainer", "DPOTrainer"])
@on_ranks_of_placement(timeout_s=100)
def test_evaluation_that_runs_out_of_memory_gives_the_loss_of_stock(trainer: str, placement: str) -> None:
    """On the last rank."""
    if placement == "FSDP2":
        use_fsdp2()
    losses = []
    fits = 2 if trainer == "SFTTrainer" else 4  # rows, of which DPO has two per sample
    for changed, rows in (lambda base: base, 1000), (adaptive, fits):
        with tempfile.TemporaryDirectory() as folder:
            given = trl_options(trainer, Path(folder), max_length=64, max_steps=1, per_device_eval_batch_size=4)
            given["model"] = tiny_llama()
            made = changed(given.pop("base"))(args=given.pop("arguments"), **given)
            made.train()
            with out_of_memory(made.model, rank=RANKS[placement] - 1, rows=rows) as failed:
                losses.append(made.evaluate(made.train_dataset.select(range(22)))["eval_loss"])
    assert bool(failed) == (rank() == RANKS[placement] - 1)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


GENERATES: dict[str, Any] = {"max_completion_length": 6, "top_k": 1}
TURNS = ["messages", "answers"]
OF_TRL: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "KTOTrainer in one process": ("trl", ["prompt", "completion"], SFT),
    "KTOTrainer on several ranks": ("trl", ["prompt", "completion"], SFT),
    "DistillationTrainer": ("trl", ["prompt"], GENERATES),
    "CPOTrainer": ("trl.experimental.cpo", ["prompt", "chosen", "rejected"], SFT),
    "ORPOTrainer": ("trl.experimental.orpo", ["prompt", "chosen", "rejected"], SFT),
    "TPOTrainer": ("trl.experimental.tpo", ["prompt", "chosen", "rejected", "reference"], SFT),
    "GKDTrainer": ("trl.experimental.gkd", TURNS, {**SFT, "lmbda": 0.0, "max_new_tokens": 6}),
    "GKDTrainer on-policy": ("trl.experimental.gkd", TURNS, {**SFT, "lmbda": 1.0, "max_new_tokens": 6}),
    "IWOPDTrainer": ("trl.experimental.iw_opd", TURNS, {**SFT, "max_completion_length": 6}),
    "OnlineDPOTrainer": ("trl.experimental.online_dpo", ["prompt"], {"max_new_tokens": 6}),
    "GMPOTrainer": ("trl.experimental.gmpo", ["prompt"], {**GENERATES, "num_generations": 4}),
    "A2POTrainer": ("trl.experimental.a2po", ["prompt"], {"max_completion_length": 6, "num_value_samples": 2}),
    "SDFTTrainer": ("trl.experimental.sdft", ["prompt", "privileged_context"], GENERATES),
    "SDPOTrainer": ("trl.experimental.sdpo", ["prompt"], {**GENERATES, "num_generations": 4}),
}


def names_for(placement: str) -> list[str]:
    other = "on several ranks" if placement == "one process" else "in one process"
    return [name for name in OF_TRL if not name.endswith(other)]


def outcome(name: str, folder: Path, placement: str) -> str:
    """Collective: train with stock, and with the mixin, which later runs out of memory in two steps."""
    module, columns, settings = OF_TRL[name]
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2, **settings}

    def run(*adaptive: AdaptiveArguments, **faults: Any) -> Run:
        given = trl_options(name.split()[0], folder, module=module, columns=columns, **settings)
        return train(folder, *adaptive, **given, **faults)

    with captured_log("torchtune_adaptive") as lines:
        stock = run()
        try:
            healthy = run(AdaptiveArguments())
        except AdaptiveError as error:
            known = "does not call super", "one row per completion", "KTO's default loss on several ranks"
            return "refused" if any(each in str(error) for each in known) else str(error)
        assert difference(healthy, stock, least=1.0) < 1e-5, name
        if any("without recovery" in line for line in from_all_ranks(lines)[0]):
            return "without recovery"
        failed = run(AdaptiveArguments(), faults=[(2, 60), (3, 100)], failing_rank=RANKS[placement] - 1)
        assert difference(failed, stock, least=1.0) < 1e-5, name
        assert failed.log[-1]["oom_recoveries"] == 2, name
        return "recovers"


@needs_trl
@pytest.mark.parametrize("placement", ["one process", "DDP"])
@on_ranks_of_placement(timeout_s=300)
def test_each_trainer_has_the_result_of_the_table(placement: str) -> None:
    """The table of docs/huggingface.md."""
    page = (Path(__file__).parents[2] / "docs/huggingface.md").read_text().partition("## Other trainers of TRL")[2]
    rows = re.findall(r"^\| (`\w.*?) \| ([\w ]+) \|", page, re.M)
    table = {name.replace("`", ""): result for names, result in rows for name in names.split(", ")}
    elsewhere = {"SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer"}
    assert table.keys() - elsewhere == OF_TRL.keys()
    with tempfile.TemporaryDirectory() as folder:
        found = {name: outcome(name, Path(folder), placement) for name in names_for(placement)}
    assert found == {name: table[name] for name in names_for(placement)}
