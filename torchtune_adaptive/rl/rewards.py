"""Reward functions, which score one group of answers at a time on the host.

The signature is TRL's. Arguments are lists with one entry per answer: `prompts` and `completions` as text,
`completion_ids` as tokens, and each other column of the sample by name. The function returns one number per answer;
None counts as 0.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from torchtune_adaptive.config.components import build_section, imported, in_a_line, path_of
from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.formatting import count_of, did_you_mean, in_columns, shown
from torchtune_adaptive.lifecycle.console import log_rank_0
from torchtune_adaptive.report.journal import Journal
from torchtune_adaptive.rl.rollouts import SCORE, Group, Rollout, results_of
from torchtune_adaptive.rl.settings import LARGEST, REWARD, REWARD_FUNCTIONS, REWARD_SECTION
from torchtune_adaptive.tune.samples import FILLER, INDEX

NOT_COLUMNS = ("tokens", "labels", "mask", INDEX, FILLER)
"""Fields of a sample that are not passed to reward functions."""
IN_WORDS = ("prompts", "completions", "completion_ids")
"""Arguments of every reward function, in addition to the columns."""
BY_MODEL = f"reward/{REWARD_SECTION}"
"""Name of the reward model's score if reward functions add to it."""


class RewardError(AdaptiveError):
    """Raised if a reward function fails; the message names the function and the sample."""


@dataclass(frozen=True)
class RewardFunction:
    """A configured reward function with its weight."""

    name: str
    weight: float
    function: Callable[..., Any]

    @property
    def result(self) -> str:
        """Name under which its rewards are stored."""
        return f"reward/{self.name}"

    def __call__(self, lists: Mapping[str, list[Any]], sample: object) -> list[float]:
        """Return one reward per answer; raise RewardError for an exception or an invalid result."""
        answers: list[str] = lists["completions"]

        def error(what: str) -> RewardError:
            at = f"sample {sample}; its first answer: {shown(answers[0][:80])}"
            return RewardError(f"reward function {self.name} {what} ({at})")

        own = {name: list(values) for name, values in lists.items()}  # a copy, which the function may modify
        try:
            returned = self.function(**own)
            if isinstance(returned, Iterator):
                returned = list(returned)
        except (Exception, SystemExit) as cause:
            at = traceback.extract_tb(cause.__traceback__)[-1]
            raise error(f"failed: {in_a_line(cause)} in {at.filename}, line {at.lineno}") from cause
        try:
            rewards = [0.0 if reward is None else float(reward) for reward in returned]
        except (TypeError, ValueError):
            rewards = []
        allowed = LARGEST / max(1.0, abs(self.weight))
        fit = len(rewards) == len(answers) and all(abs(reward) <= allowed for reward in rewards)  # False for NaN
        if isinstance(returned, str) or not fit:
            numbers = f"{count_of(len(answers), 'number')} from -{allowed:g} to {allowed:g}"
            raise error(f"returned {shown(returned)} in place of a list of {numbers} (its weight is {self.weight:g})")
        return rewards


def functions_of(cfg: DictConfig) -> tuple[RewardFunction, ...]:
    """Build the functions of the section `reward_functions`. Other keys of an entry are keyword arguments."""
    section = cfg.get(REWARD_FUNCTIONS)
    if section is None:
        return ()
    if not isinstance(section, ListConfig):
        raise ConfigError(f"{REWARD_FUNCTIONS} is {shown(section)}: allowed is a list of sections with a _component_")
    functions = [_built(f"{REWARD_FUNCTIONS}.{place}", each) for place, each in enumerate(section)]
    names = [function.name for function in functions]  # a function may be listed twice with different arguments
    return tuple(
        replace(function, name=f"{function.name}_{place}") if names.count(function.name) > 1 else function
        for place, function in enumerate(functions)
    )


def _built(key: str, section: object) -> RewardFunction:
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
    if not callable(component):
        raise ConfigError(f"{key}._component_ is {path}: allowed is a function, or a class whose objects are called")
    parameters = inspect.signature(component).parameters if options else {}
    for option in (name for name in options if name not in parameters):  # `**_` would hide a misspelt key
        raise ConfigError(f"{key}.{option} is not an argument of {path}{did_you_mean(option, ['weight', *parameters])}")
    return RewardFunction(path.rpartition(".")[2], float(weight), partial(component, **options))


class Rewards:
    """Decodes answers and scores them with the configured functions."""

    def __init__(self, cfg: DictConfig, tokenizer: Any, stop_tokens: Sequence[int]) -> None:
        self._functions, self._tokenizer, self._stop_tokens = functions_of(cfg), tokenizer, stop_tokens

    def score(self, groups: Sequence[Group]) -> None:
        """Add the weighted rewards to the reward model's scores, if any."""
        for sample, rollouts in groups if self._functions else ():
            size = len(rollouts)
            lists = {name: [value] * size for name, value in sample.items() if name not in NOT_COLUMNS}
            lists |= zip(IN_WORDS, self._in_words(rollouts), strict=True)
            for rollout in (each for each in rollouts if SCORE in each.results):
                rollout.results[BY_MODEL] = rollout.results[SCORE]
            for function in self._functions:
                number = sample.get(INDEX, rollouts[0].number // size)
                rewards = function(lists, number)
                for rollout, reward in zip(rollouts, rewards, strict=True):
                    rollout.results[function.result] = torch.tensor(reward)
                    rollout.results[SCORE] = rollout.results.get(SCORE, torch.zeros(())) + function.weight * reward

    def show(self, journal: Journal, group: Sequence[Rollout], iteration: int) -> None:
        """Log the answers and rewards of one group."""
        (prompt, *_), answers, _ = self._in_words(group)
        rewards = [float(rollout.results[SCORE]) for rollout in group]
        journal.answers(iteration, prompt, answers, rewards)
        lines = [(f"{reward:.3f}", shown(answer)) for reward, answer in zip(rewards, answers, strict=True)]
        log_rank_0(f"iteration {iteration} · answers to {shown(prompt)}\n{in_columns(lines[:8])}")

    def _in_words(self, group: Sequence[Rollout]) -> tuple[list[str], list[str], list[list[int]]]:
        """Return prompts and answers as text, and answers as token ids, all without stop tokens."""
        prompt = self._tokenizer.decode(group[0].prompt.tolist())
        answers = [each.answer[: each.length].tolist() for each in group]
        tokens = [[token for token in answer if token not in self._stop_tokens] for answer in answers]
        return [prompt] * len(group), [self._tokenizer.decode(answer) for answer in tokens], tokens

    def figures(self, everyone: Sequence[Rollout]) -> dict[str, float]:
        """Return mean rewards over all ranks, and the share of answers with at least 1 from the first function."""
        if not self._functions:
            return {}
        first, *_ = rewards = {each.result: results_of(everyone, each.result) for each in self._functions}
        success = float((rewards[first] >= 1).float().mean())
        if BY_MODEL in everyone[0].results:
            rewards[BY_MODEL] = results_of(everyone, BY_MODEL)
        return {"success": success, **{name: float(values.mean()) for name, values in rewards.items()}}


NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def exact(completions: Sequence[str], answer: Sequence[object], **_: object) -> list[float]:
    """Return 1 for an answer equal to the sample's `answer`, ignoring surrounding spaces."""
    return [float(said.strip() == str(wanted).strip()) for said, wanted in zip(completions, answer, strict=True)]


def matching(completions: Sequence[str], pattern: str, **_: object) -> list[float]:
    """Return 1 for an answer that matches the regular expression as a whole."""
    return [float(re.fullmatch(pattern, said.strip(), re.DOTALL) is not None) for said in completions]


def last_number(completions: Sequence[str], answer: Sequence[object], **_: object) -> list[float]:
    """Return 1 if the last number of an answer equals that of the sample's `answer`, as in GSM8K ("... #### 72")."""
    wanted = (_last(str(each)) for each in answer)
    return [
        float(number is not None and _last(said) == number) for said, number in zip(completions, wanted, strict=True)
    ]


def _last(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def brief(completion_ids: Sequence[Sequence[int]], free: int, most: int, **_: object) -> list[float]:
    """Return a length penalty: 0 up to `free` tokens, falling linearly to -1 at `most`."""
    return [-min(1.0, max(0, len(tokens) - free) / max(1, most - free)) for tokens in completion_ids]
