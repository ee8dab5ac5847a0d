import json
from typing import Any

import pytest
import torch

from torchtune_adaptive.fingerprint import FACTS, fingerprint
from torchtune_adaptive.peaks import Peak
from torchtune_adaptive.report import read_search, write_search
from torchtune_adaptive.search import SearchResult, search


def some_facts(**changed: Any) -> dict[str, Any]:
    return {**{fact: f"some {fact}" for fact in FACTS}, **changed}


def a_result() -> SearchResult:
    return search(lambda rows: Peak({"step": 10 + rows}, fits=True), 20)


def test_it_does_not_depend_on_order_or_on_the_kind_of_container():
    there = some_facts(model={"dim": 8, "layers": (1, 2)})
    back = dict(reversed(some_facts(model={"layers": [1, 2], "dim": 8}).items()))
    assert json.dumps(fingerprint(there)) == json.dumps(fingerprint(back))


@pytest.mark.parametrize("fact", FACTS)
def test_an_answer_is_reused_only_if_every_fact_is_the_same(tmp_path, fact: str):
    result = a_result()
    write_search(tmp_path, result, 128, fingerprint(some_facts()))
    assert read_search(tmp_path, fingerprint(some_facts())) == result
    assert read_search(tmp_path, fingerprint(some_facts(**{fact: "other"}))) is None


def test_a_fact_that_is_missing_is_named():
    facts = some_facts()
    del facts["world_size"]
    with pytest.raises(ValueError, match="lacks world_size"):
        fingerprint(facts)


def test_an_object_is_refused_where_it_is():
    with pytest.raises(ValueError, match=r"model\.layers\[1\] .* dtype"):
        fingerprint(some_facts(model={"layers": [1, torch.float32]}))
