"""Rehearsals of this package's recipes and trainers: gpu-rehearsal finds the adapters in `rehearsing.py`."""

from pathlib import Path

import pytest

from tests.rehearsals.conftest import Rehearse

RECIPE = (
    *("--", "tune", "run", "--nproc_per_node", "2", "adaptive_full_finetune_distributed"),
    *("--config", "adaptive/demo/full", "device=cuda", "adaptive.memory_limit=null"),
    *("max_steps_per_epoch=6", "use_maximum_batch_size=False"),
)
FOUR_ROWS = (*RECIPE, "batch_size=4", "gradient_accumulation_steps=1", "seed=1")
TOO_LITTLE = ("--memory", "54MiB", "--memory-overhead", "0")
"""For four rows."""
TRAINER = """
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from torchtune_adaptive.hf import AdaptiveArguments, AdaptiveTrainer

    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))
    fsdp = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    arguments = TrainingArguments("out", per_device_train_batch_size=32, max_steps=2, report_to=[], fsdp=True,
                                  fsdp_config=fsdp, save_strategy="no")
    dataset = [{"input_ids": [1] * 512, "labels": [1] * 512}] * 512
"""


@pytest.mark.smoke
def test_recipe_that_recovers_fits_and_its_errors_are_counted(rehearse: Rehearse, tmp_path: Path) -> None:
    found = rehearse(*TOO_LITTLE, *FOUR_ROWS).found
    assert len(found["caught"]) > 0
    assert "recovered from" in found["verdict"]
    assert len(found["steps"]) == 10
    written = [path.name for path in (tmp_path / "runs" / "demo" / "full").iterdir()]
    assert not {"adaptive_run.json", "epoch_0", "latest"} & set(written)  # no file that a run could resume from


def test_ranks_of_a_recipe_recover_together(rehearse: Rehearse) -> None:
    together = ("--together", "--ranks", "2")
    answer = rehearse(*together, *TOO_LITTLE, *FOUR_ROWS)
    assert "out of memory on rank" in answer.printed
    assert len(answer.found["rank_peaks"]) == 2
    assert len(rehearse(*together, "--without-data", *FOUR_ROWS).found["rank_peaks"]) == 2
    early = rehearse("--together", *RECIPE, status=2).found["verdict"]
    assert early == "no answer: the command uses CUDA before it starts the ranks: add --ranks"


@pytest.mark.parametrize("searched", [False, True], ids=["recovered", "searched"])
def test_trainer_with_the_mixin_reports_its_search_or_its_recoveries(rehearse: Rehearse, searched: bool) -> None:
    pytest.importorskip("accelerate")
    script = f"""
    {TRAINER.strip()}
    adaptive = AdaptiveArguments(use_maximum_batch_size={searched})
    AdaptiveTrainer(model, arguments, train_dataset=dataset, adaptive=adaptive).train()
    """
    answer = rehearse(
        *("--ranks", "8", "--memory", "2GiB", "--memory-overhead", "0"), *("--", "train.py"), script=script
    )
    assert ("batch search" in answer.printed) == searched
    assert [error["step"] for error in answer.found["caught"]] == [] if searched else [1, 1]
    assert len(answer.found["steps"]) == 2


def test_adaptive_trainer_has_the_work_of_stock_trainer(rehearse: Rehearse) -> None:
    pytest.importorskip("accelerate")
    stock, adaptive = (
        rehearse(
            *("--ranks", "8", "--", "train.py"),
            script=f"{TRAINER}    {trainer}(model, arguments, train_dataset=dataset).train()\n",
        ).found["time"]
        for trainer in ("Trainer", "AdaptiveTrainer")
    )
    assert adaptive["tokens_per_step"] == stock["tokens_per_step"] == 8 * 32 * 512
    assert adaptive["seconds"] == pytest.approx(stock["seconds"], rel=0.1)
    assert adaptive["flops"] == stock["flops"]
