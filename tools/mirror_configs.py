"""Writes configs/ for the sizes that people train, from the values of torchtune's own configs.

    python tools/mirror_configs.py            # writes what is missing or has drifted
    python tools/mirror_configs.py --check    # exit status 1 if anything would be written

Only values are taken over. A test runs the check, so ours cannot drift from torchtune's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torchtune
from omegaconf import OmegaConf

CONFIGS = Path(__file__).parent.parent / "configs"
STOCK = Path(torchtune.__file__).parent.parent / "recipes" / "configs"
MIRRORED = {
    "adaptive_full_finetune_distributed": (
        "llama3_1/8B_full",
        "llama3_1/70B_full",
        "llama3_2/1B_full",
        "llama3_2/3B_full",
        "llama3_3/70B_full",
        "qwen2_5/0.5B_full",
        "qwen2_5/1.5B_full",
        "qwen2_5/3B_full",
        "qwen2_5/7B_full",
        "mistral/7B_full",
        "gemma2/2B_full",
        "gemma2/9B_full",
        "gemma2/27B_full",
        "phi4/14B_full",
    ),
    "adaptive_lora_finetune_distributed": (
        "llama3_1/8B_lora",
        "llama3_1/70B_lora",
        "llama3_2/1B_lora",
        "llama3_2/3B_lora",
        "llama3_3/70B_lora",
        "llama3_3/70B_qlora",
        "qwen2_5/0.5B_lora",
        "qwen2_5/1.5B_lora",
        "qwen2_5/3B_lora",
        "qwen2_5/7B_lora",
        "qwen2_5/32B_lora",
        "qwen2_5/72B_lora",
        "mistral/7B_lora",
        "gemma2/2B_lora",
        "gemma2/9B_lora",
        "gemma2/27B_lora",
        "phi4/14B_lora",
    ),
    "adaptive_full_dpo_distributed": ("llama3_1/8B_full_dpo",),
    "adaptive_lora_dpo_distributed": ("llama3_1/8B_lora_dpo", "llama2/7B_lora_dpo"),
}
OURS = {
    "use_maximum_batch_size": False,
    "batch_increase_function": None,
    "adaptive": {"recover_from_oom": True, "memory_limit": None, "search": "linear"},
}
"""Keys that every mirrored config adds to torchtune's, with their defaults."""


def rendered(recipe: str, name: str) -> str:
    """Return the text of the mirror of this config."""
    values = OmegaConf.to_container(OmegaConf.load(STOCK / f"{name}.yaml"), resolve=False)
    assert isinstance(values, dict)
    yaml = OmegaConf.to_yaml(OmegaConf.create({**values, **OURS}))
    return (
        f"# The values of torchtune's {name}, for {recipe}:\n"
        f"#   tune run --nproc_per_node 8 {recipe} --config adaptive/{name}\n"
        "# Made by tools/mirror_configs.py: change values on the command line, or copy the file.\n\n"
        f"{yaml}"
    )


def outdated() -> dict[Path, str]:
    """File -> what it should hold, for every config that is missing or has drifted."""
    wanted = {CONFIGS / f"{name}.yaml": rendered(recipe, name) for recipe, names in MIRRORED.items() for name in names}
    return {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}


def main() -> None:
    drifted = outdated()
    for path in drifted:
        print(path.relative_to(CONFIGS))
    if "--check" in sys.argv:
        sys.exit(1 if drifted else 0)
    for path, text in drifted.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    main()
