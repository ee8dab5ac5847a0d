"""Recipes with the same training have the same code."""

import ast

import pytest

from tests.unit.source import ROOT, tree_of

OWN = {"__init__", "setup"}


def methods_of(recipe: str) -> dict[str, str]:
    """Return the code of each method, independent of formatting."""
    tree = tree_of(ROOT / "recipes" / f"adaptive_{recipe}_distributed.py")
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {method.name: ast.dump(method) for method in kind.body if isinstance(method, ast.FunctionDef)}


@pytest.mark.parametrize(("full", "lora"), [("full_finetune", "lora_finetune"), ("full_dpo", "lora_dpo")])
def test_lora_recipes_inherit_their_training_code(full: str, lora: str) -> None:
    ours, theirs = methods_of(full), methods_of(lora)
    assert {"train", "cleanup"} <= set(ours) - OWN
    assert set(theirs) <= OWN
