"""Arguments that `tune-adaptive rehearse --advise` tries."""

from torchtune_adaptive.rehearse.remedies import argument_changes


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
