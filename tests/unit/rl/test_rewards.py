"""Reward functions: calls, results and failures."""

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from torchtune_adaptive.demo.tokenizer import DemoTokenizer
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.rl.rewards import RewardError, Rewards, exact, functions_of, last_number
from torchtune_adaptive.rl.rollouts import MODEL_SCORE, SCORE, Rollout
from torchtune_adaptive.tune.samples import INDEX

HERE = __name__
PLACE = r"in place of a list of 2 numbers from -1e\+12 to 1e\+12 \(its weight is 1\)"
GROUP = (
    {"prompts": ["1+1=", "1+1="], "completions": ["2", "11"], "completion_ids": [[50], [49, 49]], "answer": ["2", "2"]},
    5,
)
"""The arguments of a function, and the number of the sample."""


def as_trl_calls(prompts: Any, completions: Any, completion_ids: Any, answer: Any, bonus: float = 0.0) -> list[float]:
    assert prompts == ["1+1=", "1+1="]
    assert completion_ids == [[50], [49, 49]]
    return [bonus + (message == wanted) for message, wanted in zip(completions, answer, strict=True)]


def nothing_to_say(**_: Any) -> list[Any]:
    return [None, 1]


def returning(value: Any, **_: Any) -> Any:
    return value


def of_a_set(**_: Any) -> Any:
    return {0, 1}


def broken(**_: Any) -> list[float]:
    raise KeyError("answer")


def late_failure(**_: Any) -> Any:
    yield 1.0
    raise KeyError("answer")


def careless(completions: Any, **_: Any) -> list[float]:
    completions.clear()
    return [0.0, 0.0]


def only_what_is_named(prompts: Any, completions: Any, completion_ids: Any, answer: Any, filler: Any) -> list[float]:
    return [0.0 for _ in completions]


def of_completions(completions: Any) -> list[float]:
    return [0.0 for _ in completions]


class Judge:
    def __init__(self, strictness: float) -> None:
        self.strictness = strictness

    def __call__(self, completions: Any, **_: Any) -> list[float]:
        return [self.strictness] * len(completions)


def built(*entries: dict[str, Any]) -> Any:
    return functions_of(OmegaConf.create({"reward_functions": [*entries]}))


def rewards_of(*entries: dict[str, Any]) -> Rewards:
    tokenizer = DemoTokenizer()
    return Rewards(OmegaConf.create({"reward_functions": [*entries]}), tokenizer, tokenizer.stop_tokens)


def function(name: str, **options: Any) -> Any:
    return built({"_component_": f"{HERE}.{name}", **options})[0]


def test_function_is_called_like_trls_with_its_keys_as_arguments() -> None:
    assert function("as_trl_calls", bonus=0.5)(*GROUP) == [1.5, 0.5]
    assert function("nothing_to_say")(*GROUP) == [0.0, 1.0]
    assert function("Judge", strictness=0.25)(*GROUP) == [0.25, 0.25]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("returning", {"value": [1.0]}, rf"returned \[1.0\] {PLACE}"),
        (
            "returning",
            {"value": [1.0, float("nan")]},
            rf"returned \[1.0, nan\] {PLACE}",
        ),
        ("returning", {"value": 7}, "failed: TypeError: 'int' object is not iterable"),
        ("returning", {"value": [1e39, 0.0]}, PLACE),
        ("returning", {"value": {1: "a", 0: "b"}}, rf"returned \{{1: 'a', 0: 'b'\}} {PLACE}"),
        ("returning", {"value": "10"}, rf"returned '10' {PLACE}"),
        ("of_a_set", {}, rf"returned \{{0, 1\}} {PLACE}"),
        ("of_completions", {}, "failed: TypeError: .* got an unexpected keyword argument '"),
        ("broken", {}, r"failed: KeyError: 'answer' in .*test_rewards\.py, line \d+"),
        ("late_failure", {}, r"failed: KeyError: 'answer' in .*test_rewards\.py, line \d+"),
    ],
)
def test_failure_names_the_function_and_the_sample(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=rf"reward function {name} .*{message}.* \(sample 5; its first answer: '?2"):
        function(name, **options)(*GROUP)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"_component_": "nowhere.at_all"}, "0._component_ is 'nowhere.at_all', which cannot be imported"),
        ({"weight": 1}, "0._component_ is null"),
        ("exact", "0 is 'exact': allowed is a section with a _component_"),
        ({"_component_": f"{HERE}.exact", "weight": "much"}, "0.weight is .*much.*: allowed is a number from -1e"),
        ({"_component_": f"{HERE}.Judge", "strict": 1}, "0 could not be built from .*Judge: TypeError: .*'strict'"),
        ({"_component_": f"{HERE}.exact", "weigth": 1}, "0.weigth is not an argument of .*exact; did you mean weight"),
        ({"_component_": f"{HERE}.exact", "column": "a"}, "0.column is not an argument of .*exact$"),
    ],
)
def test_entry_that_cannot_be_built_is_reported_under_its_key(entry: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"reward_functions\.{message}"):
        built(entry)


def test_rewards_are_weighted_added_to_the_reward_models_and_reported_by_function() -> None:
    tokenizer = DemoTokenizer()
    prompt = torch.tensor(tokenizer.encode("1+1=", add_eos=False))
    rollouts = []
    for number, text in enumerate(["2", "11"]):
        answer = torch.tensor([*tokenizer.encode(text, add_bos=False), 0, 0])
        rollouts.append(Rollout(number, 1, prompt, answer, len(text) + 1, {MODEL_SCORE: torch.tensor(10.0)}))
    judge = {"_component_": f"{HERE}.Judge", "strictness": 3, "weight": 0.5}
    careless = {"_component_": f"{HERE}.careless"}
    entries = [{"_component_": f"{HERE}.exact"}, careless, judge, {"_component_": f"{HERE}.only_what_is_named"}]
    rewards = rewards_of(*entries)
    columns = {"answer": "2", "filler": "a column"}
    rewards.score([({"tokens": prompt, "labels": prompt, **columns, INDEX: 7}, rollouts)])
    assert [each.results[SCORE].item() for each in rollouts] == [10 + 1 + 1.5, 10 + 0 + 1.5]
    figures = rewards.figures(rollouts)
    assert figures.pop("reward/only_what_is_named") == figures.pop("reward/careless") == 0
    assert figures == {"success": 0.5, "reward/exact": 0.5, "reward/Judge": 3.0, "reward/reward_model": 10.0}


def test_built_in_functions() -> None:
    assert exact([" 37\n", "73"], ["37", "37"]) == [1, 0]
    message = ["so 1,234.50", "it is 72. Or 71", "no number", "-3"]
    assert last_number(message, ["#### 1234.5", "#### 72", "#### 5", "-3"]) == [1, 0, 0, 1]


@pytest.mark.parametrize("reward", [1e30, 1e4])
def test_reward_that_is_too_large_after_its_weight_is_refused(reward: float) -> None:
    with pytest.raises(
        RewardError, match=r"in place of a list of 2 numbers from -1000 to 1000 \(its weight is 1e\+09\)"
    ):
        function("Judge", strictness=reward, weight=1e9)(*GROUP)
    assert function("Judge", strictness=1.0, weight=1e9)(*GROUP) == [1.0, 1.0]
