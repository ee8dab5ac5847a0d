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
        means="`True`: run a step again that ran out of memory. `False`: let it end the run. null: on wherever it is "
        "possible unasked, that is without `optimizer_in_bwd` and with `tensor_parallel_dim: 1`",
    )
    recover_untested: bool = option(
        BOOL,
        False,
        means="`True`: recovery also where it has not been tested: under tensor parallelism on anything but CPUs",
    )
    regrow_after: int = option(
        COUNT_OR_0,
        200,
        means="steps without trouble after which a size that has shrunk tries the next larger one; 0: never",
    )
    on_nan_loss: str = option(
        one_of("warn", "stop"),
        "warn",
        means="the first step whose loss, or norm of the gradient, is NaN or infinite: `warn` says so and goes on, "
        "`stop` ends the run on all ranks",
    )
    silent_rank_timeout: float | None = option(
        TO_A_DAY | Rule(NULL.accepts, "null, for never"),
        120,
        means="seconds after which the other ranks end, with its name, when one has stopped answering: a process that "
        "is stopped, a machine that hangs. One that is only busy, with a save, a compilation or its dataset, answers. "
        "null: they wait until the process group gives up",
    )
    memory_limit: tuple[MemorySize, ...] | None = option(
        SIZES,
        None,
        convert=_sizes,
        means="what a rank may use: `24GiB`, `500MiB`, `80GB`, a fraction `0.9`, or a list with one for each rank. "
        "On CUDA the allocator enforces it, on a CPU a meter does; without it a CPU has nothing to search",
    )

    token_budget: int | str | None = option(
        COUNT | one_of("auto") | NULL,
        None,
        means="microbatches by tokens, whichever samples of a step share one. A number: no microbatch has more. "
        "`auto`: as many as a few probes before training have shown to fit. null: by rows. In PPO, for each stage",
    )
    padding: bool | None = option(
        BOOL | NULL,
        None,
        means="under a token budget, `False`: samples stand one after another, without padding, and attention sees "
        "each alone; where that is not possible, an error. `True`: rows padded to the longest, samples of like length "
        "together. null: without wherever possible, else one line says why not",
    )
    deal: bool | None = option(
        BOOL | NULL,
        None,
        means="under a token budget, `True`: the samples of a step are dealt to the ranks by what they cost, so that "
        "none waits for the fullest; a step has the same samples as before. null: wherever that is possible, that is "
        "for models of text without tensor parallelism, and not of packs. `False`: each rank runs what it has read",
    )
    oversize: str = option(
        one_of("error", "truncate", "skip"),
        "error",
        means="a sample that is too long for any microbatch: an error that names it; or `truncate`, `skip` (left out "
        "of the loss); how many that were is told at the end of each epoch",
    )

    precompute_reference: bool = option(
        BOOL,
        False,
        means="preference training: ask the reference once for the whole dataset, before training, and free it. What "
        "it says is kept in `output_dir/reference` with a fingerprint of model, weights, tokenizer and dataset, and a "
        "checksum of each pair",
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
        means="what the answer is rounded down to: or `divisor` (of the configured samples per step), `none`",
    )
    max_batch_size: int | None = option(count_up_to(2**20) | NULL, None, means="no more rows than that; by rows only")
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
        means="what growth of the samples per step does to the learning rate: or `sqrt`, `linear`",
    )
    reuse_search: bool = option(
        BOOL,
        True,
        means="take the answer from `batch_search.json` if it was found under the same circumstances",
    )

    on_save_error: str = option(
        one_of("stop", "continue"),
        "stop",
        means="a checkpoint that cannot be written ends the run; or `continue`",
    )
    beyond_memory: str = option(
        one_of(*BEYOND_MEMORY),
        "skip",
        means="an increase beyond what fits is skipped; or `accumulate` (taken, in more microbatches), `error`",
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
