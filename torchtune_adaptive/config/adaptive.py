"""The section `adaptive:` of a config: its keys, what each may be, and what it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.config.rules import (
    BOOL,
    COUNT,
    COUNT_OR_0,
    MOST_TOKENS,
    NULL,
    SIZES,
    TO_A_DAY,
    Rule,
    count_up_to,
    keys_of,
    one_of,
    option,
    plain,
    read,
)
from torchtune_adaptive.engine.limits import ROUNDINGS
from torchtune_adaptive.engine.search import STRATEGIES
from torchtune_adaptive.errors import ConfigError, together
from torchtune_adaptive.memory_sizes import MemorySize, parse_sizes
from torchtune_adaptive.schedules.accumulation import ACCUMULATION_MODES, LR_SCALINGS
from torchtune_adaptive.schedules.growth import BEYOND_MEMORY
from torchtune_adaptive.wording import did_you_mean


def _sizes(value: Any, key: str) -> tuple[MemorySize, ...] | None:
    return None if value is None else parse_sizes(value, key)


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """The `adaptive:` section."""

    recover_from_oom: bool | None = option(
        BOOL | NULL,
        None,
        means=(
            "repeat a step that ran out of memory. null: where possible, that is, not with `optimizer_in_bwd` or "
            "tensor parallelism. `True`: refuse to start where it is not possible. `False`: end the run"
        ),
    )
    regrow_after: int = option(
        COUNT_OR_0,
        200,
        means="steps without trouble before a reduced limit tries the next larger size; 0: never",
    )
    max_skipped_steps: int = option(
        COUNT_OR_0,
        10,
        means=(
            "consecutive steps whose loss or gradients may be NaN or infinite before the run ends, on all ranks."
            " Such gradients never update the weights"
        ),
    )
    silent_rank_timeout: float | None = option(
        TO_A_DAY | Rule(NULL.accepts, "null, for never"),
        120,
        means=(
            "seconds without a sign of life from a rank (its process is stopped, its machine hangs) before the "
            "others end and name it. A rank busy with a save, a compilation or its dataset still answers. null:"
            " wait until the process group times out"
        ),
    )
    memory_limit: tuple[MemorySize, ...] | None = option(
        SIZES,
        None,
        convert=_sizes,
        means=(
            "what a rank may use: `24GiB`, `500MiB`, `80GB`, a fraction such as `0.9`, or a list with one value"
            " per rank. The CUDA allocator enforces it, on a CPU a meter does. A CPU without a limit has "
            "nothing to search"
        ),
    )

    token_budget: int | str | None = option(
        COUNT | one_of("auto") | NULL,
        None,
        means=(
            "limit microbatches by tokens instead of rows. A number: the most tokens in a microbatch. `auto`: "
            "measure what fits. null: limit by rows. In PPO, each stage has its own"
        ),
    )
    padding: bool | None = option(
        BOOL | NULL,
        None,
        means=(
            "under a token budget, `False`: pack samples without padding, with attention masked per sample; an "
            "error where that is not possible. `True`: pad rows to the longest; samples of similar length share"
            " a microbatch. null: no padding where possible, otherwise the log says why"
        ),
    )
    deal: bool | None = option(
        BOOL | NULL,
        None,
        means=(
            "under a token budget, `True`: distribute the samples of a step over the ranks by cost, so that no "
            "rank waits for the fullest. `False`: each rank runs the samples it has read. null: `True` where "
            "possible (text models without tensor parallelism or packed data)"
        ),
    )
    oversize: str = option(
        one_of("error", "truncate", "skip"),
        "error",
        means=(
            "a sample too long for any microbatch: `error` (names it), `truncate`, or `skip` (leave it out of "
            "the loss). The end of each epoch reports how many there were"
        ),
    )

    precompute_reference: bool = option(
        BOOL,
        False,
        means=(
            "preference training: run the reference once over the whole dataset before training, then free it. "
            "Its answers are kept in `output_dir/reference`, with a fingerprint of model, weights, tokenizer "
            "and dataset"
        ),
    )

    search: str = option(
        one_of(*STRATEGIES),
        "linear",
        means=(
            "`linear`: measure a few rows, extrapolate, verify. `binary`: double until it fails, then bisect. "
            "`decrease`: halve until it fits"
        ),
    )
    round_to: str = option(
        one_of(*ROUNDINGS),
        "power_of_two",
        means=(
            "round the result of a search down to a `power_of_two`, a `divisor` of the configured samples per "
            "step, or not at all (`none`)"
        ),
    )
    max_batch_size: int | None = option(
        count_up_to(2**20) | NULL,
        None,
        means="the most rows that a search or an increase may reach; not for token budgets",
    )
    sequence_length: int | None = option(
        count_up_to(MOST_TOKENS) | NULL,
        None,
        means=(
            "tokens of the longest sample to measure with. null: `tokenizer.max_seq_len`, else the longest "
            "sample of the dataset, which is scanned once"
        ),
    )
    accumulation: str = option(
        one_of(*ACCUMULATION_MODES),
        "rebalance",
        means=(
            "`rebalance`: keep the configured samples per step; grow the step only when one microbatch already "
            "holds more. `fixed`: do not change `gradient_accumulation_steps`. `keep`: never change the samples"
            " per step"
        ),
    )
    lr_scaling: str = option(
        one_of(*LR_SCALINGS),
        "none",
        means=(
            "how the learning rate follows the samples per step when they grow: `none` (unchanged), `sqrt` or `linear`"
        ),
    )
    reuse_search: bool = option(
        BOOL,
        True,
        means="reuse the result in `batch_search.json` if nothing that it depends on has changed",
    )

    on_save_error: str = option(
        one_of("stop", "continue"),
        "stop",
        means="when a checkpoint cannot be written: `stop` the run, or `continue`",
    )
    beyond_memory: str = option(
        one_of(*BEYOND_MEMORY),
        "skip",
        means="an increase beyond what fits: `skip` it, `accumulate` (apply it, in more microbatches), or `error`",
    )


def read_adaptive(section: DictConfig | None) -> AdaptiveConfig:
    """The `adaptive:` section of a config, which may be absent; a key that is not known is an error."""
    values = plain(section, "adaptive")
    read_known = partial(read, AdaptiveConfig, values, prefix="adaptive.")
    checks: list[Callable[[], object]] = [*(partial(_check_known, key) for key in values), read_known]
    together(checks)
    return read_known()


def _check_known(key: object) -> None:
    if key not in (known := keys_of(AdaptiveConfig)):
        hint = did_you_mean(str(key), known)
        raise ConfigError(f"adaptive.{key} is not a known key; allowed: {', '.join(known)}{hint}")
