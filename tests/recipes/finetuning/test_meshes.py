"""Tensor parallelism, and replicas (hybrid sharding), compared with torchtune's recipe and with a flat mesh."""

from pathlib import Path

import pytest

from tests.ranks import on_ranks
from tests.recipes.comparisons import Group, Run, Runs, assert_equals_its_reference, compared, runs_in
from tests.recipes.recorders import assert_same_figures, search_results
from tests.recipes.running import RELATIVE, SGD, demo_config, run_ours

TENSOR = (
    "tensor_parallel_dim=2",
    "tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan",
    "clip_grad_norm=null",  # stock fails with it
    *("dataset.samples=24", "batch_size=2"),
)
LIMITS = "adaptive.memory_limit=[64MiB,64MiB,64MiB,16MiB]"
CLIPPED = "clip_grad_norm=0.5"
APART = ("tensor_parallel_dim=1", "~tensor_parallel_plan", "batch_size=1", CLIPPED)
"""The same steps without tensor parallelism, on ranks with different samples."""
REPLICAS = ("data_parallel_replicate_dim=2",)
STEPS = ("optimizer.lr=0.05", "batch_size=2", "clip_grad_norm=0.7", "epochs=2", "resume_from_checkpoint=auto")


def starved(little: str) -> Run:
    """Limit the memory of one rank of the second replica."""
    limit = f"adaptive.memory_limit=[120MiB,120MiB,120MiB,{little}]"
    return Run((*REPLICAS, "adaptive.token_budget=4000", "adaptive.sequence_length=null", limit), like="flat")


GROUPS = {
    "tensor": Group(
        "full",
        4,
        (*SGD, *TENSOR),
        {
            "by one": Run(("batch_size=1", "gradient_accumulation_steps=4")),
            "searched": Run(
                (LIMITS, "use_maximum_batch_size=True", "adaptive.search=decrease", "adaptive.sequence_length=256")
            ),
            "predicted": Run((LIMITS, "use_maximum_batch_size=True", "adaptive.sequence_length=256")),
            "budget": Run((LIMITS, "adaptive.token_budget=auto", "adaptive.sequence_length=null")),
            "starved": Run(("adaptive.memory_limit=[64MiB,64MiB,64MiB,9MiB]",)),
            "clipped": Run((CLIPPED,), like=""),
            "apart": Run(APART, like=""),
        },
        figures=("step", "loss"),
        compares_weights=False,
    ),
    "replicas": Group(
        "full",
        4,
        (*SGD, *STEPS),
        {
            "flat": Run(like=""),
            "whole": Run(
                ("data_parallel_replicate_dim=4", "data_parallel_shard_dim=1", "adaptive.recover_from_oom=False"),
                like="flat",
            ),
            "searched": Run(
                (*REPLICAS, "use_maximum_batch_size=True", "adaptive.max_batch_size=4", "adaptive.memory_limit=60MiB"),
                like="flat",
            ),
            "starved": starved("10MiB"),
            "onto a flat mesh": Run(first=REPLICAS, like="flat"),
            "onto replicas": Run(REPLICAS, first=(), like="flat"),
        },
        stop_at=5,
    ),
    "pairs": Group("lora_dpo", 4, (*SGD, *STEPS), {"flat": Run(like=""), "starved": starved("17MiB")}),
}
runs = runs_in(GROUPS)


@pytest.mark.parametrize(("group", "name"), compared(GROUPS))
def test_figures_and_weights_are_those_of_the_reference(runs: Runs, group: str, name: str) -> None:
    of = GROUPS[group]
    assert_equals_its_reference(of, name, runs(group, name), runs(group, of.runs[name].like))


@pytest.mark.parametrize("group", GROUPS)
def test_oom_on_one_rank_is_recovered(runs: Runs, group: str) -> None:
    recoveries = runs(group, "starved").events("recovery")
    assert {tuple(event["ranks"]) for event in recoveries} == {(3,)}


def test_search_and_token_budget_fit_the_tightest_rank(runs: Runs) -> None:
    [search], [profile] = (
        search_results(runs("tensor", name).folder / "out").values() for name in ("searched", "budget")
    )
    assert search["rows"] == 2
    assert not all(probe["peak"]["fits"] for probe in search["probes"])
    assert profile["budget_bytes"] == 16 * 2**20
    assert all(step["microbatches"] > 1 for step in runs("tensor", "searched").log)


def test_clipping_and_records_equal_those_without_tensor_parallelism(runs: Runs) -> None:
    together, apart = runs("tensor", "clipped").steps, runs("tensor", "apart").steps
    assert_same_figures(together, apart, ("loss", "grad_norm", "samples", "target_tokens"), rel=RELATIVE)
    assert all(step["grad_norm"] > 0.5 for step in apart)


@on_ranks(4, in_group=False)
def test_replicas_start_with_the_same_adapters(tmp_path: Path) -> None:
    """Although every rank draws its own. tests/distributed/endings/test_refusals.py shows that others are refused."""
    run_ours("lora", demo_config("lora", tmp_path / "run", *REPLICAS, "dataset.samples=32"))
