"""Find out if the loss of a batch is the sum or a mean of its microbatches' losses.

`LossCheck` runs two short samples in one batch and in separate ones. `find_reduction` compares their losses. If these
do not show how losses add up, for example because all are 0, it asks for more rows, and then for other weights.
"""

from __future__ import annotations

import logging
import math
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from itertools import accumulate, chain, cycle, islice, repeat
from operator import attrgetter
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from torchtune_adaptive.engine.fsdp import is_whole
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.ranks import from_all_ranks, rank, world_size
from torchtune_adaptive.engine.recovery import Recovery
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.snapshot import RngState
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.engine.tensors import plain_tensors
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.hf.metrics import only_fsdp_communicates
from torchtune_adaptive.hf.samples import IGNORED, CollatedBatch, Counts, GeneratedRow, RawSample

logger = logging.getLogger(__name__)

FP32_TOLERANCE, TF32_TOLERANCE, HALF_TOLERANCE = 3e-5, 0.002, 0.02
"""Tolerances relative to the loss, by the precision of the model; HALF is 16 bits."""
NOTICEABLE = 0.001
"""In 16 bits, an error above this may be rounding or a term that compares samples; see `is_systematic`."""
TRIALS = 10
"""The comparisons of `is_systematic`."""
ROUNDING_ERROR = 1e-6
"""The largest rounding error relative to the loss in full precision."""
MOST_CLASSES = 4
"""In classification, the check pairs the shortest samples of up to this many classes with one other sample."""
CHECKED_TOKENS = 32
"""The check shortens samples to this many tokens, so that it needs little memory and time."""
SHORTER = CHECKED_TOKENS * 3 // 4
"""The most tokens of one of two samples."""
COMPARED_ROWS = 16
"""The most rows that the check compares at once."""
COPIED_BYTES = 2**24
"""The check restores buffers and other tensors up to this size. Larger ones may be quantized weights."""
NOT_SPLIT = (
    "so a step cannot be split; use a loss that is a sum or a mean over rows or tokens, and that compares no samples, "
    "uses no batch normalization and draws no random numbers for each row"
)
CHECK_FAILED = (
    "the check of the loss, which needs two short samples in one batch, could not collate them or ran out of memory"
)
UNDECIDED = (
    "the check of the loss does not show if a step can be split, because the losses of short samples are equal (for "
    "example 0), infinite or NaN"
)


class Reduction(Enum):
    """How the losses of microbatches are combined to the loss of a batch."""

    SUM = "sum"
    MEAN_OF_ROWS = "mean over rows"
    MEAN_OF_LABELS = "mean over labels"
    MEAN_OF_NEXT_TOKENS = "mean over labels of next tokens"

    def weight(self, part: Counts, whole: Counts) -> float:
        """Return the factor of a microbatch's loss, given the counts of the microbatch and of the whole batch."""
        if self is Reduction.SUM:
            return float(part.rows > 0)
        name = {Reduction.MEAN_OF_ROWS: "rows", Reduction.MEAN_OF_LABELS: "labels"}.get(self, "next_tokens")
        return float(getattr(part, name) / max(1, getattr(whole, name)))


class BatchLoss(NamedTuple):
    """The loss of a batch."""

    loss: Any
    """A number, or a tensor whose value has not been read yet."""
    counts: Counts
    is_random: bool = False
    """True if the forward pass drew random numbers."""


class Look(NamedTuple):
    """A comparison of losses."""

    rows: int = 2
    noise: float = 0.0
    """The size of the noise that is added to weights."""
    seed: int = 0
    """The seed of the noise."""


LOOKS = (Look(), Look(COMPARED_ROWS), Look(noise=0.1), Look(COMPARED_ROWS, noise=1.0))
"""The comparisons of a check, in order. In a healthy run, the first one decides. A loss that compares samples may be 0
for two rows and not for more. With noise, a policy differs from its reference, and no loss stays saturated."""


class TwoSamples(NamedTuple):
    """The losses of two samples, or of two groups of samples, on one rank: in one batch, and in separate batches."""

    both: BatchLoss
    first: BatchLoss
    second: BatchLoss

    def __str__(self) -> str:
        separate = f"{self.first.loss:.4g} and {self.second.loss:.4g} in separate batches"
        return f"the loss of {self.both.counts.rows} samples is {self.both.loss:.4g} in one batch, and {separate}"

    def error(self, reduction: Reduction, scale: float) -> float:
        """Return the error of a reduction, relative to the largest loss or to `scale` if that is larger."""
        apart = self.first, self.second
        whole = Counts.total(each.counts for each in apart)
        found = sum(one.loss * reduction.weight(one.counts, whole) for one in apart)
        return float(found - self.both.loss) / (max(self._largest, scale) or 1.0)

    @property
    def _largest(self) -> float:
        return float(max(abs(each.loss) for each in self))

    def errors(self, scale: float) -> dict[Reduction, float]:
        """Return the size of the error of each reduction."""
        errors = {each: abs(self.error(each, scale)) for each in Reduction}
        return {each: math.inf if math.isnan(error) else error for each, error in errors.items()}

    def shows(self, reduction: Reduction, tolerance: float) -> bool:
        """Return True if the losses show this reduction. Losses of 0 or their rounding do not, and equal losses
        show no mean."""
        both, first, second = (each.loss for each in self)
        spread = both if reduction is Reduction.SUM else first - second
        return bool(self.errors(0.0)[reduction] <= tolerance < abs(spread) / (self._largest or 1.0))


class Found(NamedTuple):
    """The result of a check."""

    reduction: Reduction | None
    scale: float
    """The largest loss without noise."""
    reason: str | None
    """Why a step cannot be split; None if it can."""


def find_reduction(
    compare: Callable[[Look], list[TwoSamples] | None],
    trainer: Any,
    model: nn.Module,
    *,
    known: Reduction | None = None,
    scale: float = 0.0,
    thorough: bool = False,
) -> Found:
    """Collective: find out how losses add up, from as few comparisons as possible, with `thorough` from two or more.

    `compare` is collective. It returns the losses on all ranks, or None if a rank could not compute them. Try `known`
    first. Errors are relative to `scale` if that is larger than the losses.
    """
    tolerance = tolerance_of(model, mixed_precision=trainer.accelerator.mixed_precision != "no")
    shifts_labels, tried, largest = getattr(trainer, "_loss_shifts_labels", True), list[TwoSamples](), 0.0
    for number, look in enumerate(LOOKS):
        on_ranks = compare(look)
        if on_ranks is None:
            if number:
                continue
            if rank() == 0:
                logger.warning("%s, so it is skipped", CHECK_FAILED)
            return Found(None, 0.0, CHECK_FAILED)
        tried += (each for each in on_ranks if math.isfinite(each.first.loss + each.second.loss))
        if not tried:
            continue
        if not look.noise:
            largest = max(abs(each.both.loss) for each in tried)
        if (reduction := known) is None or worst_error(tried, reduction, scale) > tolerance:
            reduction = how_losses_add_up(tried, shifts_labels=shifts_labels, tolerance=tolerance, scale=scale)
        if reduction is None:
            worst = max(tried, key=lambda each: min(each.errors(scale).values()))
            return Found(None, 0.0, f"{worst}, which is neither their sum nor their mean, {NOT_SPLIT}")
        if any(each.shows(reduction, tolerance) for each in tried) and (number or not thorough):
            in_doubt = tolerance == HALF_TOLERANCE and worst_error(tried, reduction, scale) > NOTICEABLE
            if in_doubt and is_systematic(compare, reduction, scale):
                worst = max(tried, key=lambda each: each.errors(scale)[reduction])
                return Found(None, 0.0, f"{worst}, which is not only rounded, {NOT_SPLIT}")
            return Found(reduction, largest, None)
    return Found(None, 0.0, UNDECIDED)


def is_systematic(compare: Callable[[Look], list[TwoSamples] | None], reduction: Reduction, scale: float) -> bool:
    """Collective: return True if the error of a reduction stays similar when small weights change, as that of a term
    that compares samples does. Rounding errors then change their signs."""
    errors = []
    for seed in range(TRIALS):
        trial = [each.error(reduction, scale) for each in compare(Look(COMPARED_ROWS, noise=0.03, seed=seed)) or ()]
        errors += [fmean(trial)] if trial and all(map(math.isfinite, trial)) else []
    return len(errors) > TRIALS // 2 and abs(fmean(errors)) > max(NOTICEABLE, 2 * stdev(errors))


def how_losses_add_up(
    on_ranks: Sequence[TwoSamples], *, shifts_labels: bool, tolerance: float, scale: float = 0.0
) -> Reduction | None:
    """Return the reduction with the smallest error over all ranks; None if every error exceeds the tolerance.

    `shifts_labels` selects the likely one of the two means over labels. In full precision, the other one is preferred
    if only its error is small enough to be rounding.
    """
    worst = {each: worst_error(on_ranks, each, scale) for each in Reduction}
    likely, other = Reduction.MEAN_OF_NEXT_TOKENS, Reduction.MEAN_OF_LABELS
    if not shifts_labels:
        likely, other = other, likely
    if tolerance == FP32_TOLERANCE and worst[likely] > ROUNDING_ERROR > worst[other]:
        likely = other
    candidates = (likely, Reduction.SUM, Reduction.MEAN_OF_ROWS)  # if several errors are equal, `min` takes the first
    best = min(candidates, key=lambda each: max(worst[each], ROUNDING_ERROR))
    return None if worst[best] > tolerance else best


def worst_error(on_ranks: Sequence[TwoSamples], reduction: Reduction, scale: float) -> float:
    """Return the largest error of a reduction over the ranks."""
    return max(tried.errors(scale)[reduction] for tried in on_ranks)


def tolerance_of(model: nn.Module, *, mixed_precision: bool) -> float:
    """Return the tolerance for the precision in which the model computes."""
    parameter = next(model.parameters())
    if mixed_precision or parameter.dtype.itemsize < 4:
        return HALF_TOLERANCE
    if parameter.device.type == "cuda" and (
        torch.backends.cuda.matmul.fp32_precision == "tf32"
        or any(isinstance(module, _ConvNd) for module in model.modules())  # in TF32 by default
    ):
        return TF32_TOLERANCE
    return FP32_TOLERANCE


class WithoutDropout(TorchFunctionMode):
    """Disables dropout, including that of attention, while the model stays in training mode."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if function is nn.functional.dropout:
            return args[0] if args else options["input"]
        if function is nn.functional.scaled_dot_product_attention:
            args = args if len(args) <= 4 else (*args[:4], 0.0, *args[5:])
            options.pop("dropout_p", None)
        return function(*args, **options)


class LossCheck:
    """The checks of the loss in one `Trainer.train()`."""

    def __init__(
        self,
        trainer: Any,
        model: nn.Module,
        collate: Callable[[Sequence[RawSample]], CollatedBatch],
        kind: SampleKind[Any],
        recovery: Recovery,
    ) -> None:
        self.reduction: Reduction | None = None
        """How losses add up. None until it is known; then, each microbatch must be a batch of the data loader."""
        self.checked_step = 0
        """The step of the latest check; 0 before the first one."""
        self.runner = StepRunner(
            model, self._compute_loss, kind=kind, limit=RowLimit(2), recovery=recovery, stage="check of the loss"
        )
        self.runner.trains = False
        self._trainer, self._model, self._collate = trainer, model, collate
        self._split_steps = 0
        self._pads: bool | None = None
        """True if the collator pads samples of different lengths, unlike `default_data_collator`; unknown until the
        first check."""
        self._scale = 0.0
        """The largest loss of the first check. Later checks divide errors by the larger one of this loss and the
        current one, because with a current loss near 0, rounding alone would be a large relative error."""

    def count_split_step(self) -> bool:
        """Count a step that splits batches. Return True if it must be checked: the first, second, 4th, 8th and so on of
        them, and all while the reduction is unknown."""
        self._split_steps += 1
        in_turn = self._split_steps.bit_count() == 1
        return self.reduction is None or (in_turn and self.checked_step != self._trainer.state.global_step + 1)

    def find(
        self, samples: Sequence[RawSample], num_items: Any, restore: Callable[[], None], *, splits: bool
    ) -> str | None:
        """Collective: find out how the losses of microbatches add up. Return None, or the reason why a step cannot be
        split. `restore` restores the state of the trainer before each pass. With `splits`, which means that this step
        is split, compare more than two rows."""
        try:
            found = find_reduction(
                lambda look: self.compare(samples, num_items, restore, look),
                self._trainer,
                self._model,
                known=self.reduction,
                scale=self._scale,
                thorough=splits,
            )
        except Exception as error:
            if world_size() > 1 or isinstance(error, AdaptiveError):  # the ranks could have failed in different places
                raise
            return f"the check of the loss has failed ({type(error).__name__}: {error})"
        if found.reason in (CHECK_FAILED, UNDECIDED) and self.reduction:
            return None
        if found.reason is None:
            self.reduction, self.checked_step = found.reduction, self._trainer.state.global_step + 1
            self._scale = self._scale or found.scale
        return found.reason

    def compare(
        self,
        samples: Sequence[RawSample],
        num_items: Any,
        restore: Callable[[], None],
        look: Look = LOOKS[0],
        *,
        alone: bool = False,
    ) -> list[TwoSamples] | None:
        """Collective: return the losses of groups of samples on all ranks, in one batch and in separate batches; None
        if a rank runs out of memory or cannot collate the samples.

        The model is in training mode, since some terms of a loss exist only there, but without dropout. If a forward
        pass draws random numbers on any rank, try again in evaluation mode. With `alone`, run one sample twice instead,
        so that the engine sees if the loss communicates.
        """
        if self._pads is None:
            unequal = [samples[0].shortened(SHORTER), samples[0]]
            self._pads = all(from_all_ranks(can_collate(self._collate, unequal)))
        firsts, second = candidates(samples, look.rows, pads=self._pads)
        if not (is_whole(self._model) or isinstance(second[0], GeneratedRow)):  # so that all ranks use the same layers
            firsts, second = from_all_ranks((firsts, second))[0]
        pairs = [microbatch for first in firsts for microbatch in (first, [*first, *second])]
        if not all(from_all_ranks(can_collate(self._collate, second if alone else pairs[-1]))):
            return None  # an error on one rank would leave its peers in a collective
        attention = getattr(getattr(self._model, "config", None), "_attn_implementation", None)
        self._num_items, self._restore = num_items, restore
        self._restore_attributes = remember_attributes(self._trainer, *self._model.modules())
        # Compiling for two samples could exceed the limit of recompilations. flex_attention has to be compiled.
        stance = partial(torch.compiler.set_stance, "default" if attention == "flex_attention" else "force_eager")
        try:
            for training in (True, False):
                self._in_training = training
                self._losses: list[BatchLoss] = []
                without_dropout = WithoutDropout() if training else nullcontext()
                with stance(), without_dropout, noise_in(self._model, look):
                    on_ranks = losses_of_groups(
                        self.runner, [second, *([second] if alone else pairs)], lambda: self._losses
                    )
                if on_ranks is None:
                    return None
                if not any(each.both.is_random for each in on_ranks):
                    break
        finally:
            self._model.train()
            self._restore_attributes()
            self._losses = []
        return on_ranks

    def _compute_loss(self, samples: Sequence[RawSample]) -> Totals:
        """Collective: compute the loss of a microbatch without gradients, and add it to `_losses`."""
        self._restore()
        self._restore_attributes()
        self._model.train(self._in_training)
        trainer, state, batch = self._trainer, random_state(), self._collate(samples)
        isolated = only_fsdp_communicates(trainer, self._model, generated=isinstance(samples[0], GeneratedRow))
        with torch.no_grad(), isolated, trainer.compute_loss_context_manager():
            inputs = trainer._prepare_inputs(batch.inputs)
            loss = trainer.compute_loss(self._model, inputs, num_items_in_batch=self._num_items)
        self._losses.append(BatchLoss(loss.detach(), batch.counts, is_random=state != random_state()))
        return Totals(torch.zeros(()), 0)


def losses_of_groups(
    runner: StepRunner[Any], microbatches: Sequence[Sequence[Any]], losses: Callable[[], Sequence[BatchLoss]]
) -> list[TwoSamples] | None:
    """Collective: return the losses on all ranks, or None if a rank runs out of memory. The first microbatch is the
    second group; then come each first group, and both groups together. `losses` returns those of the microbatches."""
    result, _ = runner.attempt(microbatches)
    if result is None:
        return None
    of_second, *others = (each._replace(loss=float(each.loss)) for each in losses())
    tried = [*map(TwoSamples, others[1::2], others[::2], repeat(of_second))]
    return [*chain(*from_all_ranks(tried))]


def can_collate(collate: Callable[[Sequence[RawSample]], object], samples: Sequence[RawSample]) -> bool:
    """Return True if these samples can be collated to one batch."""
    try:
        collate(samples)
    except Exception:  # noqa: BLE001 - a collator may raise any error
        return False
    return True


def candidates(samples: Sequence[Any], rows: int, *, pads: bool) -> tuple[list[list[RawSample]], list[RawSample]]:
    """Collective: return candidates for the first of two groups of samples, and the second group. Each group has one
    sample or, with more than two `rows`, half of them.

    A candidate has fewer labels than the second group, so that reductions give different results. All ranks return the
    same number of candidates, because computing a loss is collective.
    """
    by_length = sorted(samples, key=attrgetter("length"))
    labelled = [each for each in by_length if each.label != IGNORED] or by_length
    shortest = [each.shortened(CHECKED_TOKENS) for each in labelled]
    one = shortest[0]
    generated = isinstance(one, GeneratedRow)  # set scores and lengths, because they may be equal in all rows
    if generated and rows == 2:
        firsts = others = [one]
    elif rows > 2:
        used = shortest[: min(from_all_ranks(min(rows, len(shortest))))]
        firsts, others = used[: len(used) // 2] or used, used[len(used) // 2 :]
    else:
        others = sorted(shortest[1:] or shortest, key=lambda each: (each.label == one.label, each.length == one.length))
        of_classes = {each.label: each for each in reversed(shortest)}
        most = min(max(from_all_ranks(len(of_classes))), MOST_CLASSES)
        firsts, others = [*islice(cycle(of_classes.values()), most)], others[:1]
    if generated:
        few: list[RawSample] = [each.scored(1.0, targets=1) for each in firsts]
        second: list[RawSample] = [each.scored(2.0, targets=each.length) for each in others]
    else:
        # shorter than the second group, so that the batch of both is padded
        shorter = [each.shortened(SHORTER) for each in firsts] if pads else firsts
        marked = ((each, each.with_targets(few=True)) for each in shorter)
        # a pair of answers has no labels of which some could be ignored
        few = [each.shortened(CHECKED_TOKENS // 2) if same is each and pads else same for each, same in marked]
        second = [each.with_targets() for each in others]
    return [few] if rows > 2 else [[each] for each in few], second


@contextmanager
@torch.no_grad()
def noise_in(model: nn.Module, look: Look) -> Iterator[None]:
    """Within the context, add the noise of this look to the smallest trained parameters, up to COPIED_BYTES, such as
    weights of norms, biases and adapters. Their values are restored exactly."""
    trained = (each.detach() for each in model.parameters() if each.requires_grad and each.dtype.itemsize > 1)
    local = (plain for each in trained for plain in plain_tensors(each))
    by_size = sorted(local, key=attrgetter("nbytes")) if look.noise else []
    used = sum(total <= COPIED_BYTES for total in accumulate(each.nbytes for each in by_size))
    generator, copies = torch.Generator().manual_seed(look.seed), [(each, each.clone()) for each in by_size[:used]]
    try:
        for parameter, _ in copies:
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=look.noise)
        yield
    finally:
        for parameter, value in copies:
            parameter.copy_(value)


def random_state() -> object:
    """Return the states of all random generators that a forward pass may use, to compare them."""
    python, numpy, torch_states = random.getstate(), pickle.dumps(np.random.get_state()), RngState.capture()
    return python, numpy, [None if each is None else each.tolist() for each in (torch_states.cpu, torch_states.cuda)]


def remember_attributes(*owners: Any) -> Callable[[], None]:
    """Return a function that restores buffers, and attributes that are or were numbers, strings or tensors.

    A loss may count its calls, or keep an average in an attribute. A check of the loss must not change these.
    """
    attributes = [(vars(owner), dict(vars(owner))) for owner in owners]
    buffers = [(now["_buffers"], dict(now["_buffers"])) for now, _ in attributes if "_buffers" in now]
    values = chain.from_iterable(before.values() for _, before in (*attributes, *buffers))
    contents = [(each, each.detach().clone()) for each in {*filter(_is_small_tensor, values)}]

    @torch.no_grad()
    def restore() -> None:
        for now, before in attributes:
            _restore_values(now, before)
        for now, before in buffers:
            now.update(before)
        for tensor, content in contents:
            if not torch.equal(tensor, content):  # for example the statistics of a batch normalization
                tensor.copy_(content)

    return restore


def _is_small_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.nbytes <= COPIED_BYTES


def _restore_values(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Restore numbers, strings and tensors. A new True stays, with all that was added beside it: it may mean that
    something is initialized."""
    present, saved = (
        {name: each for name, each in attributes.items() if isinstance(each, int | float | str | Tensor)}
        for attributes in (now, before)
    )
    added = {name: each for name, each in present.items() if name not in before}
    now.update(saved)
    for name in added if not any(each is True for each in added.values()) else ():
        del now[name]
