"""Reward functions. A call scores the answers to one prompt, on the host.

The signature is TRL's. Arguments are lists with one entry per answer: `prompts` and `completions` as text,
`completion_ids` as tokens, and the columns of the sample by name. The function returns one number per answer; None
counts as 0.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from torchtune_adaptive.config.components import build_section, imported, in_a_line, path_of
from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.formatting import count_of, did_you_mean, shown
from torchtune_adaptive.rl.rollouts import MODEL_SCORE, REWARDS, SCORE, Group, Rollout, results_of
from torchtune_adaptive.rl.settings import LARGEST, REWARD, REWARD_FUNCTIONS
from torchtune_adaptive.tune.samples import INDEX

NOT_COLUMNS = ("tokens", "labels", "mask", INDEX)
"""Fields of a sample that are not passed to reward functions."""
DECODED = ("prompts", "completions", "completion_ids")
"""Arguments of every reward function, in addition to the columns."""


class RewardError(AdaptiveError):
    """Raised if a reward function fails; the message names the function and the sample."""


@dataclass(frozen=True)
class RewardFunction:
    """A configured reward function with its weight."""

    name: str
    weight: float
    function: Callable[..., Any]

    def __call__(self, arguments: Mapping[str, list[Any]], sample: object) -> list[float]:
        """Return one reward per answer; raise RewardError for an exception or an invalid result."""
        answers: list[str] = arguments["completions"]
        where = f"(sample {sample}; its first answer: {shown(answers[0][:80])})"
        copies = {name: list(values) for name, values in arguments.items()}  # which the function may modify
        try:
            returned = self.function(**copies)
            unordered = isinstance(returned, str | bytes | Mapping | Set)
            rewards = [] if unordered else [0.0 if reward is None else float(reward) for reward in returned]
        except Exception as cause:
            at = traceback.extract_tb(cause.__traceback__)[-1]
            failed = f"{in_a_line(cause)} in {at.filename}, line {at.lineno}"
            raise RewardError(f"reward function {self.name} failed: {failed} {where}") from cause
        allowed = LARGEST / max(1.0, abs(self.weight))
        if len(rewards) != len(answers) or not all(abs(reward) <= allowed for reward in rewards):  # False for a NaN
            numbers = f"{count_of(len(answers), 'number')} from -{allowed:g} to {allowed:g}"
            raise RewardError(
                f"reward function {self.name} returned {shown(returned if unordered else rewards)} in place of a list "
                f"of {numbers} (its weight is {self.weight:g}) {where}"
            )
        return rewards


def functions_of(cfg: DictConfig) -> tuple[RewardFunction, ...]:
    """Build the functions of the config section `reward_functions`."""
    section = cfg.get(REWARD_FUNCTIONS)
    if section is None:
        return ()
    if not isinstance(section, ListConfig):
        raise ConfigError(f"{REWARD_FUNCTIONS} is {shown(section)}: allowed is a list of sections with a _component_")
    functions = [_build_function(f"{REWARD_FUNCTIONS}.{index}", each) for index, each in enumerate(section)]
    names = [function.name for function in functions]  # a function may be listed twice with different arguments
    return tuple(
        replace(function, name=f"{function.name}_{index}") if names.count(function.name) > 1 else function
        for index, function in enumerate(functions)
    )


def _build_function(key: str, section: object) -> RewardFunction:
    """Build a function. Keys other than `_component_` and `weight` are keyword arguments."""
    path = path_of(key, section)
    assert isinstance(section, DictConfig)
    plain: Any = OmegaConf.to_container(section, resolve=True)
    options = {str(name): value for name, value in plain.items() if name != "_component_"}
    weight = options.pop("weight", 1.0)
    if not REWARD.accepts(weight):
        raise ConfigError(f"{key}.weight is {shown(weight)}: allowed is {REWARD.allowed}")
    component = imported(f"{key}._component_", path)
    if inspect.isclass(component):
        component, options = build_section(key, OmegaConf.create({"_component_": path, **options})), {}
    parameters = inspect.signature(component).parameters if options else {}
    for option in (name for name in options if name not in parameters):  # a function with `**_` would ignore it
        raise ConfigError(f"{key}.{option} is not an argument of {path}{did_you_mean(option, ['weight', *parameters])}")
    return RewardFunction(path.rpartition(".")[2], float(weight), partial(component, **options))


class Rewards:
    """Decodes answers and scores them with the configured functions."""

    def __init__(self, cfg: DictConfig, tokenizer: Any, stop_tokens: Sequence[int]) -> None:
        self._functions, self._tokenizer, self._stop_tokens = functions_of(cfg), tokenizer, stop_tokens

    def score(self, groups: Sequence[Group]) -> None:
        """Store each reward, and as the score their weighted sum plus the score of the reward model, if any."""
        for sample, rollouts in groups:
            size = len(rollouts)
            arguments = {name: [value] * size for name, value in sample.items() if name not in NOT_COLUMNS}
            arguments |= zip(DECODED, self._decode(rollouts), strict=True)
            for rollout in rollouts:
                rollout.results[SCORE] = rollout.results.get(MODEL_SCORE, torch.zeros(()))
            for function in self._functions:
                rewards = function(arguments, sample.get(INDEX, rollouts[0].number // size))
                for rollout, reward in zip(rollouts, rewards, strict=True):
                    rollout.results[REWARDS + function.name] = torch.tensor(reward)
                    rollout.results[SCORE] = rollout.results[SCORE] + function.weight * reward

    def _decode(self, group: Sequence[Rollout]) -> tuple[list[str], list[str], list[list[int]]]:
        """Return prompts and answers as text, and answers as token ids, all without stop tokens."""
        prompt = self._tokenizer.decode(group[0].prompt.tolist())
        answers = [each.answer[: each.length].tolist() for each in group]
        tokens = [[token for token in answer if token not in self._stop_tokens] for answer in answers]
        return [prompt] * len(group), [self._tokenizer.decode(answer) for answer in tokens], tokens

    def figures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the mean of each reward, and the fraction of answers whose first reward is at least 1 (`success`)."""
        if not self._functions:
            return {}
        success = float((results_of(rollouts, REWARDS + self._functions[0].name) >= 1).float().mean())
        rewards = [name for name in rollouts[0].results if name.startswith(REWARDS)]
        return {"success": success, **{name: float(results_of(rollouts, name).mean()) for name in rewards}}


NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def exact(completions: Sequence[str], answer: Sequence[object], **_: object) -> list[float]:
    """Return 1 for an answer equal to the sample's `answer`, ignoring surrounding spaces."""
    return [float(text.strip() == str(wanted).strip()) for text, wanted in zip(completions, answer, strict=True)]


def last_number(completions: Sequence[str], answer: Sequence[object], **_: object) -> list[float]:
    """Return 1 if the last number of an answer equals that of the sample's `answer`, as in GSM8K ("... #### 72")."""
    wanted = (_last(str(each)) for each in answer)
    return [
        float(number is not None and _last(text) == number) for text, number in zip(completions, wanted, strict=True)
    ]


def _last(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
