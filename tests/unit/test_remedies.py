"""Arguments that `tune-adaptive rehearse --advise` tries."""

from collections.abc import Sequence

from torchtune_adaptive.rehearse.gpus import GPUS, Gpu
from torchtune_adaptive.rehearse.remedies import argument_changes, try_remedies
from torchtune_adaptive.rehearse.result import GIB, RehearsalResult


def test_smaller_batches_keep_the_samples_of_a_step() -> None:
    found = argument_changes(["train.py", "--per-device-train-batch-size=4", "--gradient_accumulation_steps", "3"])
    assert found[:2] == [
        ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "6"),
        ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "12"),
    ]
    assert ("--gradient_checkpointing", "True") in found


def test_arguments_that_are_set_and_commands_of_no_known_trainer_are_left_alone() -> None:
    assert ("--gradient_checkpointing", "True") not in argument_changes(
        ["train.py", "--output_dir", "out", "--gradient_checkpointing", "True"]
    )
    assert argument_changes(["train.py", "--batch-size", "8"]) == []
    assert ("--activation_checkpoint.mode", "full") in argument_changes(["train.py", "--job.config_file", "8b.toml"])


def rehearsed_at_16_gib(command: Sequence[str], gpu: Gpu, ranks: int | None) -> RehearsalResult:
    """A script that needs 40 GiB: 16 less with checkpointing, 12 less with offloading, and half with half a batch."""
    assert "train.py" in command
    launched, own = command[: (at := command.index("train.py"))], command[at:]
    needed = 40 - 16 * ("--fsdp_activation_checkpointing" in launched) - 12 * ("--fsdp_offload_params" in launched)
    needed = (needed / 2 if "2" in own else needed) / (ranks or 1) * 2
    step = {"step": 1, "allocated_bytes": needed * GIB, "reserved_bytes": needed * GIB, "flushes": 0}
    end = {"allocated_bytes": 0, "reserved_bytes": 0, "flushes": 0, "error": None, "replays": 0, "stopped": True}
    about = {"usable_bytes": 16 * GIB, "overhead_bytes": GIB, "rank": 0, "ranks": ranks or 1}
    if needed <= 16:
        return RehearsalResult(**about, status=0, steps=[step] * 2, end=end)
    error = {**step, "asked_bytes": GIB, "has_optimizer": True, "allowed_bytes": 16 * GIB, "in_search": False}
    return RehearsalResult(**about, status=1, errors=[error], end={**end, "by_memory": True})


def test_two_changes_are_combined_if_none_is_enough_and_accelerates_options_precede_the_script() -> None:
    command = ["accelerate", "launch", "--num_processes", "2", "--use_fsdp", "train.py"]
    options = "--fsdp_activation_checkpointing true", "--fsdp_offload_params true"
    assert [" ".join(each) for each in argument_changes(command)] == [*options]
    fitting = try_remedies(rehearsed_at_16_gib, command, GPUS["h100"], 2)
    assert [(row.label, row.ranks) for row in fitting if row.ranks == 2] == [(" ".join(options), 2)]
    assert {row.ranks for row in fitting} == {2, 8, 16}
    halved = [*command, "--per_device_train_batch_size", "4"]
    labels = [row.label for row in try_remedies(rehearsed_at_16_gib, halved, GPUS["h100"], 2) if row.ranks == 2]
    assert [label.count("--") > 1 for label in labels] == [True, True]
