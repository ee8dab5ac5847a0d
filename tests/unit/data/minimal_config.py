"""The keys that every config needs."""

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
