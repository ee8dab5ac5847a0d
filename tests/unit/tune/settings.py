"""What a config has to say before it can be asked for anything else."""

from typing import Any

NEEDED: dict[str, Any] = {
    "device": "cpu",
    "dtype": "fp32",
    "output_dir": "out",
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "epochs": 1,
    "shuffle": False,
}
