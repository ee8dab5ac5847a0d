"""Predict the memory and speed of a run without a GPU, weights or data, by running its recipe on a simulated GPU.

    tune run adaptive_plan --config llama3_1/8B_full world_size=8 memory_limit=80GB sequence_length=4096

Accepts the configs of torchtune and of this package for finetuning, preference training, PPO and GRPO, unchanged.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from torchtune_adaptive.config.command_line import name_of
from torchtune_adaptive.errors import AdaptiveError, ConfigError
from torchtune_adaptive.forecast import output
from torchtune_adaptive.forecast.alternatives import try_alternatives
from torchtune_adaptive.forecast.rehearse_recipe import rehearse_recipe
from torchtune_adaptive.forecast.request import PLAN_KEYS, read_request
from torchtune_adaptive.lifecycle.entry_point import DictConfig, run_query
from torchtune_adaptive.rehearse.sweep import in_parallel

NOTHING_FITS = "no other setting fits, not even on 8 times the ranks: lower sequence_length, or use a larger GPU"


def main(cfg: DictConfig, path: Path, overrides: Sequence[str]) -> None:
    """Print the predicted memory and time; raise an AdaptiveError if the config does not fit."""
    started = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1
    if started > 1:
        raise ConfigError(
            f"adaptive_plan runs in one process, but {started} were started: remove --nproc_per_node, and set "
            f"world_size={started}"
        )
    request = read_request(cfg, name_of(path), overrides)
    variants, as_table, advise = [*request.variants()], request.plan.format == "table", request.plan.advise
    by_variant = dict(in_parallel(rehearse_recipe, {at: (variant,) for at, variant in enumerate(variants)}))
    forecasts = [by_variant[at] for at in range(len(variants))]
    if as_table:
        print(output.as_text(forecasts[0]) if len(variants) == 1 else output.table(forecasts), flush=True)
    fits = any(forecast.fits for forecast in forecasts)
    to_improve = variants if advise or (advise is None and not fits) else []
    alternatives = output.best_first([fitting for variant in to_improve for fitting in try_alternatives(variant)])
    if as_table and to_improve:
        print(output.table(alternatives) if alternatives else NOTHING_FITS, flush=True)
    if not as_table:
        print(output.as_json([*forecasts, *alternatives]))
    if not fits:
        others_fit = any(each.fits for each in alternatives)
        remedy = "the settings above fit" if others_fit else "advise=True tries every other setting"
        raise AdaptiveError(f"the config does not fit; {remedy}")


if __name__ == "__main__":
    run_query(main, keys=PLAN_KEYS)
