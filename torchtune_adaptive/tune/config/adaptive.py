"""The section `adaptive:` of a config: its keys, what each may be, and what it means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.errors import ConfigError, together
from torchtune_adaptive.limits.rounding import ROUNDINGS
from torchtune_adaptive.memory_sizes import MemorySize, parse_sizes
from torchtune_adaptive.schedules.accumulation import ACCUMULATION_MODES, LR_SCALINGS
from torchtune_adaptive.schedules.growth import BEYOND_MEMORY
from torchtune_adaptive.search.strategies import STRATEGIES
from torchtune_adaptive.tune.config.rules import (
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
from torchtune_adaptive.wording import did_you_mean


def _sizes(value: Any, key: str) -> tuple[MemorySize, ...] | None:
    return None if value is None else parse_sizes(value, key)


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """The `adaptive:` section."""

    recover_from_oom: bool | None = option(
        BOOL | NULL,
        None,
        means="`True`: repeat a step that ran out of memory. `False`: let it end the run. null: repeat it, except "
        "with `optimizer_in_bwd` or tensor parallelism",
    )
    regrow_after: int = option(
        COUNT_OR_0,
        200,
        means="steps without trouble after which a limit that has shrunk tries the next larger size; 0: never",
    )
    on_nan_loss: str = option(
        one_of("warn", "stop"),
        "warn",
        means="what to do about the first step whose loss or gradient norm is NaN or infinite: `warn` and go on, or "
        "`stop` the run on all ranks",
    )
    silent_rank_timeout: float | None = option(
        TO_A_DAY | Rule(NULL.accepts, "null, for never"),
        120,
        means="seconds without an answer from a rank (its process is stopped, its machine hangs) after which the "
        "others end and name it. A rank that is only busy with a save, a compilation or its dataset still "
        "answers. null: wait until the process group gives up",
    )
    memory_limit: tuple[MemorySize, ...] | None = option(
        SIZES,
        None,
        convert=_sizes,
        means="what a rank may use: `24GiB`, `500MiB`, `80GB`, a fraction such as `0.9`, or a list with one for each "
        "rank. On CUDA the allocator enforces it, on a CPU a meter does; a CPU without a limit has nothing to "
        "search",
    )

    token_budget: int | str | None = option(
        COUNT | one_of("auto") | NULL,
        None,
        means="limit microbatches by tokens in place of rows. A number: the most tokens of a microbatch. `auto`: as "
        "many as a few probes before training show to fit. null: limit by rows. In PPO, each stage has its own",
    )
    padding: bool | None = option(
        BOOL | NULL,
        None,
        means="under a token budget, `False`: samples stand one after another, without padding, and attention sees "
        "each alone; an error where that is not possible. `True`: rows are padded to the longest, and samples "
        "of like length share a microbatch. null: no padding wherever possible; where not, a line of the log "
        "says why",
    )
    deal: bool | None = option(
        BOOL | NULL,
        None,
        means="under a token budget, `True`: the samples of a step are dealt to the ranks by what they cost, so that "
        "none waits for the fullest; a step has the same samples as before. null: wherever that is possible: "
        "for models of text, without tensor parallelism or packs. `False`: each rank runs what it has read",
    )
    oversize: str = option(
        one_of("error", "truncate", "skip"),
        "error",
        means="what to do with a sample that is too long for any microbatch: `error` (which names it), `truncate`, or "
        "`skip` (leave it out of the loss). The end of each epoch tells how many there were",
    )

    precompute_reference: bool = option(
        BOOL,
        False,
        means="preference training: ask the reference once for the whole dataset, before training, and free it. Its "
        "log-probabilities are kept in `output_dir/reference`, with a fingerprint of model, weights, tokenizer "
        "and dataset, and a checksum of each pair",
    )

    search: str = option(
        one_of(*STRATEGIES),
        "linear",
        means="`linear`: measure few rows, extrapolate each phase, verify. `static`: predict as `adaptive_plan` does, "
        "verify; if that fails, or nothing can be predicted, go on as `linear`. `binary`: double until it fails, then "
        "bisect. `decrease`: halve from above until it fits",
    )
    round_to: str = option(
        one_of(*ROUNDINGS),
        "power_of_two",
        means="what the result of a search is rounded down to: `power_of_two`, `divisor` (of the configured samples "
        "per step) or `none`",
    )
    max_batch_size: int | None = option(
        count_up_to(2**20) | NULL,
        None,
        means="the most rows that a search or an increase may come to; not for token budgets",
    )
    sequence_length: int | None = option(
        count_up_to(MOST_TOKENS) | NULL,
        None,
        means="tokens of the worst case; null: `tokenizer.max_seq_len`, else the longest sample of the dataset "
        "(scanned once, with a progress bar)",
    )
    accumulation: str = option(
        one_of(*ACCUMULATION_MODES),
        "rebalance",
        means="`rebalance`: keep the configured samples per step, grow the step only when one microbatch already "
        "holds more. `fixed`: leave `gradient_accumulation_steps` alone. `keep`: never change the samples per step",
    )
    lr_scaling: str = option(
        one_of(*LR_SCALINGS),
        "none",
        means="how the learning rate follows the samples per step when they grow: `none` (it stays), `sqrt` or "
        "`linear`",
    )
    reuse_search: bool = option(
        BOOL,
        True,
        means="take the result of an earlier search from `batch_search.json` if nothing has changed that it depends on",
    )

    on_save_error: str = option(
        one_of("stop", "continue"),
        "stop",
        means="what to do when a checkpoint cannot be written: `stop` the run, or `continue`",
    )
    beyond_memory: str = option(
        one_of(*BEYOND_MEMORY),
        "skip",
        means="what to do with an increase beyond what fits: `skip` it, `accumulate` (take it, in more microbatches), "
        "or `error`",
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
        raise ConfigError(f"adaptive.{key} is not a known key: allowed are {', '.join(known)}{hint}")
