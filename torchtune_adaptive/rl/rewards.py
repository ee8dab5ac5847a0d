"""Rewards as functions: what answers are worth, computed on the host, one group of answers at a time.

A function is called as TRL calls one, with lists as long as the group: `prompts` and `completions` as text,
`completion_ids` as tokens, and each further column of the sample under its name. It returns a number for each answer;
None counts as nothing. In the config:

    reward_functions:
      - _component_: torchtune_adaptive.rl.rewards.last_number
        weight: 1.0
      - _component_: my_module.short_and_polite
        weight: 0.2
"""

from __future__ import annotations

import inspect
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torchtune.config._utils import _get_component_from_path

from torchtune_adaptive.config.components import in_a_line, path_of
from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.rl.rollouts import SCORE, Rollout, results_of
from torchtune_adaptive.rl.settings import REWARD_FUNCTIONS
from torchtune_adaptive.text import count_of, shown
from torchtune_adaptive.tune.metrics import RunJournal
from torchtune_adaptive.tune.samples import FILLER, INDEX, Sample


class RewardError(AdaptiveError):
    """A reward function that has failed; the message names it and the sample."""


@dataclass(frozen=True)
class Group:
    """The answers to one prompt."""

    sample: int
    """The number of its sample in the dataset."""
    prompt: str
    answers: Sequence[str]
    tokens: Sequence[Sequence[int]]
    columns: Mapping[str, object]
    """What the dataset has for the prompt besides its tokens."""


@dataclass(frozen=True)
class RewardFunction:
    name: str
    weight: float
    function: Callable[..., Any]
    timeout_s: float | None = None

    @property
    def result(self) -> str:
        """Its name among the results of a rollout, and in the log."""
        return f"reward/{self.name}"

    def __call__(self, group: Group) -> list[float]:
        """The rewards of a group, without the weight."""
        returned = self._call(group)
        try:
            rewards = [0.0 if reward is None else float(reward) for reward in returned]
        except (TypeError, ValueError):
            raise self._error(group, f"returned {shown(returned)} in place of a list of numbers") from None
        if len(rewards) != len(group.answers) or not all(map(math.isfinite, rewards)):
            wanted = count_of(len(group.answers), "finite number")
            raise self._error(group, f"returned {shown(rewards)} in place of {wanted}")
        return rewards

    def _call(self, group: Group) -> Any:
        size = len(group.answers)
        lists = {name: [value] * size for name, value in group.columns.items()}
        lists |= {"prompts": [group.prompt] * size, "completions": [*group.answers]}
        lists["completion_ids"] = [[*tokens] for tokens in group.tokens]
        returned: list[Any] = []
        failed: list[Exception] = []

        def run() -> None:
            try:
                returned.append(self.function(**lists))
            except Exception as error:  # noqa: BLE001
                failed.append(error)

        if self.timeout_s is None:
            run()
        else:  # nothing can end a function from outside: the thread is left behind, and ends with the process
            thread = threading.Thread(target=run, daemon=True, name=self.name)
            thread.start()
            thread.join(self.timeout_s)
        if failed:
            raise self._error(group, f"failed: {in_a_line(failed[0])}") from failed[0]
        if not returned:
            raise self._error(group, f"has not returned within {self.timeout_s:g} s (reward_timeout)")
        return returned[0]

    def _error(self, group: Group, what: str) -> RewardError:
        answer = shown(group.answers[0][:80]) if group.answers else "none"
        return RewardError(f"reward function {self.name} {what} (sample {group.sample}; its first answer: {answer})")


def build_rewards(cfg: DictConfig, timeout_s: float | None, tokenizer: Any, stop_tokens: Sequence[int]) -> Rewards:
    """The functions of the section `reward_functions`, in its order."""
    return Rewards(functions_of(cfg, timeout_s), tokenizer, stop_tokens)


def functions_of(cfg: DictConfig, timeout_s: float | None = None) -> tuple[RewardFunction, ...]:
    """Further keys of an entry are arguments."""
    section = cfg.get(REWARD_FUNCTIONS)
    if section is None:
        return ()
    if not isinstance(section, ListConfig):
        raise ConfigError(f"{REWARD_FUNCTIONS} is {shown(section)}: allowed is a list of sections with a _component_")
    return tuple(_built(f"{REWARD_FUNCTIONS}.{place}", each, timeout_s) for place, each in enumerate(section))


def _built(key: str, section: object, timeout_s: float | None) -> RewardFunction:
    path = path_of(key, section)
    assert isinstance(section, DictConfig)
    plain: Any = OmegaConf.to_container(section, resolve=True)
    options = {str(name): value for name, value in plain.items() if name != "_component_"}
    weight = options.pop("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"{key}.weight is {shown(weight)}: allowed is a finite number")
    try:
        component = _get_component_from_path(path)
    except Exception as error:
        raise ConfigError(f"{key}._component_ is {path}, which cannot be imported: {in_a_line(error)}") from error
    if inspect.isclass(component):
        component, options = component(**options), {}
    if not callable(component):
        raise ConfigError(f"{key}._component_ is {path}: allowed is a function, or a class whose objects are called")
    return RewardFunction(path.rpartition(".")[2], float(weight), partial(component, **options), timeout_s)


NOT_COLUMNS = ("tokens", "labels", "mask", INDEX, FILLER)


class Rewards:
    """Scores answers by functions, in the words of a tokenizer."""

    def __init__(self, functions: Sequence[RewardFunction], tokenizer: Any, stop_tokens: Sequence[int]) -> None:
        self._functions, self._tokenizer, self._stop_tokens = functions, tokenizer, stop_tokens

    def score(self, prompts: Sequence[Sample], rollouts: Sequence[Rollout]) -> None:
        """Adds the rewards of this rank's answers, equally many to each prompt, to what a reward model has said."""
        size = len(rollouts) // max(1, len(prompts))
        for place, sample in enumerate(prompts) if self._functions else ():
            own = rollouts[place * size : (place + 1) * size]
            tokens = [self._without_stops(rollout) for rollout in own]
            group = Group(
                sample=int(sample.get(INDEX, own[0].number // size)),
                prompt=self._tokenizer.decode(own[0].prompt.tolist()),
                answers=[self._tokenizer.decode(answer) for answer in tokens],
                tokens=tokens,
                columns={str(name): value for name, value in sample.items() if name not in NOT_COLUMNS},
            )
            for function in self._functions:
                for rollout, reward in zip(own, function(group), strict=True):
                    so_far = rollout.results.get(SCORE, torch.zeros(()))
                    rollout.results[function.result] = torch.tensor(reward)
                    rollout.results[SCORE] = so_far + function.weight * reward

    def show(self, journal: RunJournal, everyone: Sequence[Rollout], size: int, iteration: int) -> None:
        """The answers to the first prompt, of `size`, in the log and in the record."""
        own = everyone[:size]
        answers = [self._tokenizer.decode(self._without_stops(rollout)) for rollout in own]
        prompt = self._tokenizer.decode(own[0].prompt.tolist())
        journal.answers(iteration, prompt, answers, [float(rollout.results[SCORE]) for rollout in own])

    def _without_stops(self, rollout: Rollout) -> list[int]:
        answer = rollout.answer[: rollout.length].tolist()
        return [token for token in answer if token not in self._stop_tokens]

    def figures(self, everyone: Sequence[Rollout]) -> dict[str, float]:
        """Means over all ranks. An answer is a success where the first function gives it 1 or more."""
        if not self._functions:
            return {}
        first, *_ = rewards = {each.result: results_of(everyone, each.result) for each in self._functions}
        success = float((rewards[first] >= 1).float().mean())
        return {"success": success, **{name: float(values.mean()) for name, values in rewards.items()}}


NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def exact(completions: Sequence[str], answer: Sequence[object], **_: object) -> list[float]:
    """1 where an answer is the sample's `answer`, spaces around it apart."""
    return [float(said.strip() == str(wanted).strip()) for said, wanted in zip(completions, answer, strict=True)]


def matching(completions: Sequence[str], pattern: str, **_: object) -> list[float]:
    """1 where the whole answer matches a regular expression."""
    return [float(re.fullmatch(pattern, said.strip(), re.DOTALL) is not None) for said in completions]


def last_number(completions: Sequence[str], answer: Sequence[object], **_: object) -> list[float]:
    """1 where the last number of an answer is that of the sample's `answer`, as in GSM8K ("... #### 72")."""
    wanted = (_last(str(each)) for each in answer)
    return [
        float(number is not None and _last(said) == number) for said, number in zip(completions, wanted, strict=True)
    ]


def _last(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def brief(completion_ids: Sequence[Sequence[int]], free: int, most: int, **_: object) -> list[float]:
    """0 up to `free` tokens, then down to -1 at `most`: long answers are discouraged before they are cut off."""
    return [-min(1.0, max(0, len(tokens) - free) / max(1, most - free)) for tokens in completion_ids]
