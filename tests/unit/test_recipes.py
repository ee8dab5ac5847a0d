"""Recipes that train the same way say so in the same words."""

import ast

import pytest

from tests.unit.source import ROOT, tree_of

OWN = {"__init__", "setup"}


def methods_of(recipe: str) -> dict[str, str]:
    """What each method does, however it is laid out."""
    tree = tree_of(ROOT / "recipes" / f"adaptive_{recipe}_distributed.py")
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {method.name: ast.dump(method) for method in kind.body if isinstance(method, ast.FunctionDef)}


@pytest.mark.parametrize(("full", "lora"), [("full_finetune", "lora_finetune"), ("full_dpo", "lora_dpo")])
def test_full_and_lora_train_in_the_same_words(full: str, lora: str) -> None:
    """Each recipe is read from top to bottom, so what a pair shares is written twice: mend one, and mend the other."""
    ours, theirs = methods_of(full), methods_of(lora)
    assert {"train", "cleanup"} <= set(ours) - OWN
    assert {name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)} == OWN
