"""`adaptive.token_budget`: microbatches by tokens, as many as the config says or as were measured to fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchtune_adaptive.engine.limits import Limit, RowLimit, TokenLimit, longest_row
from torchtune_adaptive.errors import ConfigError, OneRowDoesNotFitError, SampleTooLargeError
from torchtune_adaptive.life.console import say
from torchtune_adaptive.schedules.growth import EpochSizes
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune.fitting import FitRequest, profile_lengths, search_batch_size
from torchtune_adaptive.tune.loader import StepLoader, looking_ahead
from torchtune_adaptive.tune.longest_sample import longest_sample
from torchtune_adaptive.tune.oversize import Admission, remedy_for, too_large
from torchtune_adaptive.tune.sample_exchange import Dealer, FullestRank
from torchtune_adaptive.tune.samples import Sample

LONGEST_SAMPLE = 2**20
"""The longest sample that is compared with the limit, where nothing says less."""


@dataclass(frozen=True)
class Microbatches:
    """How the samples of a run's steps share microbatches."""

    limit: Limit | None = None
    """Limit of a microbatch; None: by rows, as many as the sizes of the epoch say."""
    admission: Admission | None = None
    """Admission of samples, where some may be too long for any microbatch."""
    dealer: Dealer | FullestRank | None = None
    """Deals the samples of each step to the ranks; None: they stay where they were read."""

    def limit_of(self, sizes: EpochSizes) -> Limit:
        return self.limit or RowLimit(sizes.microbatch_rows)

    def steps(
        self, loader: StepLoader[Sample], sizes: EpochSizes, *, steps_done: int = 0, samples_done: int = 0
    ) -> Iterator[tuple[list[Sample], list[Sample] | None]]:
        """Collective: the steps left of an epoch, each with the next one where that has to be planned ahead."""
        steps = loader.epoch(
            sizes.epoch,
            samples_per_step=sizes.samples_per_step,
            steps=sizes.steps - steps_done,
            samples_done=samples_done,
        )
        if self.limit is None or not self.limit.by_length:
            return ((samples, None) for samples in steps)
        admission = self.admission
        admitted = steps if admission is None else map(admission.admit, steps)
        ahead = looking_ahead(admitted if self.dealer is None else self.dealer.deal(admitted))
        return ahead if admission is None else admission.telling(ahead, sizes.epoch)


def microbatches_of(
    request: FitRequest, limit: Limit | None, *, earlier: Limit | None = None, longest_of_model: int | None = None
) -> Microbatches:
    """Collective: those of the stage that trains, where it has a limit in tokens. `earlier` is that of one before it,
    which runs the same samples; `longest_of_model` the longest sequence that the model takes."""
    data, kind, oversize = request.data, request.kind, request.settings.adaptive.oversize
    if limit is None:
        return Microbatches()
    if data.packed:
        return Microbatches(_as_rows(limit, kind.length_of(data.dataset[0])))
    longest = min(longest_row(each, LONGEST_SAMPLE) for each in (limit, earlier) if each is not None)
    if longest_of_model is not None and oversize != "error":
        longest = min(longest, kind.length_at(longest_of_model))
    return Microbatches(limit, admission_of(request, longest))


def admission_of(request: FitRequest, longest: int, remedy: str | None = None) -> Admission:
    """Collective: what sees to it that no sample is longer than a microbatch has room for. `remedy` ends the error."""
    data, kind, oversize = request.data, request.kind, request.settings.adaptive.oversize
    remedy = remedy or remedy_for(request.settings, kind.longest_at(longest))
    admission = Admission(data.dataset, kind, longest, oversize, remedy)
    # The tokenizer says how long samples are to be; a dataset may know nothing of it, and each sample is looked at.
    if data.max_seq_len is None or kind.length_at(data.max_seq_len) > longest:
        if oversize == "error":
            _check_longest(request, longest, remedy)
        else:
            tokens = f"{count_of(longest, 'token')}{kind.length_suffix}"
            say(f"token budget · samples of more than {tokens} are {admission.done} (adaptive.oversize)")
    return admission


def budget_limit(request: FitRequest, most_rows: int) -> Limit | None:
    """Collective: the number of the config, or what was measured; None without a budget, or where nothing can be.

    A step has `most_rows` samples at most.
    """
    budget, memory, data = request.settings.adaptive.token_budget, request.memory, request.data
    if budget is None or isinstance(budget, int):
        return None if budget is None else TokenLimit(budget, request.kind.padded_rows)
    if memory is None:
        say(
            "token budget · skipped: a CPU has no memory limit to search within; set adaptive.memory_limit, or the "
            "budget to a number"
        )
        return None
    if data.packed:
        return RowLimit(search_batch_size(request, memory, most_rows))
    try:
        return profile_lengths(request, memory, most_rows).limit
    except OneRowDoesNotFitError as error:
        if request.settings.adaptive.sequence_length or data.max_seq_len:
            raise
        index = longest_sample(request.settings.config, data.dataset, request.kind).at
        raise SampleTooLargeError(
            f"sample {index} of the dataset is the longest, and {error.fact}", *error.remedies
        ) from None


def _as_rows(limit: Limit, length: int) -> RowLimit:
    """Rows of one length: as many as fit, in the order of the data, with nothing to gain from sorting."""
    rows = limit.rows_at(length)
    if rows == 0:
        raise ConfigError(
            f"adaptive.token_budget is {limit}, but every packed row has {length}: "
            f"set it to {length} or more, or lower tokenizer.max_seq_len"
        )
    say(f"token budget · the dataset is packed, all rows have {length} tokens: microbatches of {RowLimit(rows)}")
    return RowLimit(rows)


def _check_longest(request: FitRequest, fitting: int, remedy: str) -> None:
    """Collective: every rank sees the same error."""
    longest = longest_sample(request.settings.config, request.data.dataset, request.kind)
    if longest.length > fitting:
        raise too_large(request.kind, longest.at, longest.length, fitting, remedy)
