"""Combines the metrics that TRL's trainers collect for each microbatch to metrics of whole batches."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, zip_longest
from operator import mul
from typing import Any, NamedTuple

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from torchtune_adaptive.contexts import override_attributes
from torchtune_adaptive.engine.fsdp import FSDPModule
from torchtune_adaptive.engine.ranks import from_all_ranks, world_size

_OF_TOKENS = re.compile("token|entropy|kl$|logits")
_COUNTER = "num_tokens"
_CHOSEN, _REJECTED, _MARGINS = "rewards/chosen", "rewards/rejected", "rewards/margins"


class WeightedMetric(NamedTuple):
    """A metric of a microbatch, and its weight in the mean over microbatches."""

    value: float
    weight: int


class BatchMetrics:
    """Takes the metrics of each microbatch out of `trainer._metrics`, and puts those of whole batches back.

    TRL appends the metrics of each pass, and logs their mean, so a batch that is split would count several times. Means
    over rows are weighted by rows, means over tokens by the tokens in the loss. Trainers of transformers have none.
    """

    def __init__(self, trainer: Any, mode: str) -> None:
        self._trainer, self._mode = trainer, mode
        self._complete: list[dict[str, list[WeightedMetric]]] = []
        """For each batch since the last log, the values of its microbatches."""
        self._current: dict[int, dict[str, list[WeightedMetric]]] = {}
        """The same for the batches of the current step, by number."""

    @contextmanager
    def of_microbatch(self, batch: int, rows: int, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Run a microbatch, a part of this batch, inside the context. `rows` is 0 for a filler."""
        collected = getattr(self._trainer, "_metrics", {})
        lengths = {name: len(values) for name, values in collected.get(self._mode, {}).items()}
        by_token = getattr(self._trainer, "importance_sampling_level", None) == "token"
        weights = _MetricWeights.of(inputs, rows, clips_tokens=by_token) if collected and rows else None
        yield
        metrics = collected.get(self._mode, {})
        for name in metrics.keys() - {_COUNTER}:
            values, start = metrics[name], lengths.get(name, 0)
            metrics[name] = values[:start]
            if weights is not None:
                part = self._current.setdefault(batch, {}).setdefault(name, [])
                part += [WeightedMetric(value, weights.weight(name)) for value in values[start:]]

    def discard_step(self) -> None:
        """Delete the values of the current step, which is repeated."""
        self._current.clear()

    def end_step(self, *, batches: int = 1, mixed: bool = False) -> None:
        """Keep the values of the current step, which has this number of batches. If microbatches span batches
        (`mixed`), all values are under batch 0, and count for each batch."""
        self._complete += [self._current.get(0 if mixed else number, {}) for number in range(batches)]
        self._current.clear()

    def publish(self) -> None:
        """Collective: put the metrics of complete batches, combined over microbatches and ranks, back for TRL's log."""
        if self._mode not in getattr(self._trainer, "_metrics", ()):
            return
        metrics = self._trainer._metrics[self._mode]
        complete, counters = zip(*from_all_ranks((self._complete, metrics.get(_COUNTER, []))), strict=True)
        for on_ranks in zip_longest(*complete, fillvalue={}):  # a streamed dataset may end earlier on some ranks
            names = dict.fromkeys(name for batch in on_ranks for name, values in batch.items() if values)
            whole = {name: _combined(name, [*chain(*(batch.get(name, ()) for batch in on_ranks))]) for name in names}
            if {_CHOSEN, _REJECTED} <= whole.keys():  # a microbatch may lack one of them
                whole[_MARGINS] = whole[_CHOSEN] - whole[_REJECTED]
            for name, value in whole.items():
                metrics[name].append(value)
        if any(counters):  # a gather repeats this rank's tokens for all ranks, so the mean is the sum over ranks
            metrics[_COUNTER] = [sum(chain(*counters)) / len(counters)]
        for name in [name for name, values in metrics.items() if not values]:
            del metrics[name]
        self._complete.clear()


def _combined(name: str, values: Sequence[WeightedMetric]) -> float:
    """Return the metric of the microbatches together: the smallest or largest value, or the weighted mean."""
    known = [each for each in values if not math.isnan(each.value)] or values
    numbers = [each.value for each in known]
    if extreme := re.search("(?:^|[_/])(min|max)(?:$|_)", name):
        return (min if extreme[1] == "min" else max)(numbers)
    weights = [each.weight for each in known]
    if len(set(numbers)) == 1 or not any(weights):
        return sum(numbers) / len(numbers)
    return float(sum(map(mul, numbers, weights)) / sum(weights))


class _MetricWeights(NamedTuple):
    """The tokens in the loss of each row, and whether the row is a chosen answer."""

    tokens: Sequence[int]
    is_chosen: Sequence[bool]
    has_pairs: bool
    clips_tokens: bool
    """True if `clip_ratio` counts tokens, False if it counts sequences."""

    @staticmethod
    def of(inputs: Mapping[str, Any], samples: int, *, clips_tokens: bool) -> _MetricWeights:
        """Return the weights of a collated microbatch. Waits for the device."""
        labels, mask = inputs.get("labels"), inputs.get("completion_mask")
        tokens = [1] * samples
        if isinstance(labels, Tensor) and labels.dim() == 2:
            tokens = (labels[:, 1:] != -100).sum(1).tolist()
        elif isinstance(mask, Tensor):
            generated = "completion_ids" in inputs  # the mask then covers the completions only
            tokens = (mask if generated else mask[:, 1:]).sum(1).tolist()
        has_pairs = len(tokens) == 2 * samples  # of DPO: the chosen answers, then the rejected ones
        halves = [True] * samples + [False] * samples
        is_chosen = halves if has_pairs else [*map(bool, inputs.get("label", tokens))]
        return _MetricWeights(tokens, is_chosen, has_pairs, clips_tokens)

    def weight(self, name: str) -> int:
        """Return the weight of a metric of this name."""
        is_chosen = "chosen" in name or (self.has_pairs and "accuracy" in name)
        rows = [
            tokens
            for tokens, chosen in zip(self.tokens, self.is_chosen, strict=False)
            if (not is_chosen or chosen) and not ("rejected" in name and chosen)
        ]
        of_tokens = _OF_TOKENS.search(name) or (self.clips_tokens and "clip_ratio" in name)
        return sum(rows) if of_tokens else len(rows)


@contextmanager
def only_fsdp_communicates(trainer: Any, model: nn.Module, *, generated: bool = False) -> Iterator[None]:
    """Suppress the gathers of metrics in TRL's trainers, because a rank that ran out of memory could not complete them.

    Within this context, a gather returns the value of this rank for all ranks; `BatchMetrics` combines the metrics
    later. The gathers of other trainers stay, because their losses may depend on them. The context also gathers the
    weight of a frozen head before the pass: TRL reads it without calling the module, so FSDP's hooks would not gather
    it. Batches that are `generated` are not prepared again.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    gathers_head = isinstance(head, FSDPModule) and weight is not None and not weight.requires_grad
    with ExitStack() as stack:
        if generated:
            stack.enter_context(override_attributes(trainer, _prepare_inputs=lambda inputs: inputs))
        if world_size() > 1 and hasattr(trainer, "_metrics"):
            local: dict[str, Any] = {"gather": _repeat_for_ranks, "gather_for_metrics": _repeat_for_ranks}
            local["reduce"] = lambda value, *_, **__: value  # TRL reduces and divides two sums
            stack.enter_context(override_attributes(trainer.accelerator, **local))
        if gathers_head:
            head.unshard()
            stack.callback(head.reshard)
        yield


def _repeat_for_ranks(value: Any, *_: Any, **__: Any) -> Any:
    """Return this rank's value as often as there are ranks; used in place of a gather."""
    return recursively_apply(lambda tensor: torch.cat([torch.atleast_1d(tensor)] * world_size()), value)
