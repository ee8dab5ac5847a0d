"""What will fit, predicted without a GPU, without weights and without data.

    tune run adaptive_plan --config llama3_1/8B_full world_size=8 memory_limit=80GB sequence_length=4096

Takes every config of the recipes for finetuning, preference training and PPO, torchtune's and ours, unchanged.
"""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from torchtune_adaptive.atomic_files import reason
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.report.pictures import draw_forecast
from torchtune_adaptive.tune.console import progress_bar
from torchtune_adaptive.tune.plan.advice import Advice, advise, on_ranks
from torchtune_adaptive.tune.plan.capacities import frontier, predict, traces
from torchtune_adaptive.tune.plan.output import Output, heading, show_compared
from torchtune_adaptive.tune.plan.question import Question
from torchtune_adaptive.tune.plan.settings import PLAN_KEYS, read_plan_settings
from torchtune_adaptive.tune.start import launch
from torchtune_adaptive.tune.start.command_line import name_of
from torchtune_adaptive.tune.trace.which_recipe import as_finetuning
from torchtune_adaptive.tune.validate.plan import check_plan


def main(cfg: DictConfig) -> None:
    settings, cfg = read_plan_settings(cfg), as_finetuning(cfg)
    check_plan(cfg, settings)
    at = sys.argv.index("--config")
    given = [*sys.argv[1:at], *sys.argv[at + 2 :]]
    question = Question(cfg, settings, name_of(Path(sys.argv[at + 1])), given)
    if len(settings.several_ranks) > 1:
        compare(question)
    else:
        predict_one(question)


def compare(question: Question) -> None:
    """The same question for several numbers of ranks, in one table."""
    with progress_bar("tracing", traces(question.cfg) * len(question.plan.several_ranks), "steps") as bar:
        compared = on_ranks(question, traced=bar.update)
    show_compared(compared, question.plan.format)


def predict_one(question: Question) -> None:
    """What fits, and advice."""
    with progress_bar("tracing", traces(question.cfg), "steps") as bar:
        found = predict(question.cfg, question.plan, traced=bar.update)

    def advise_on(at: int) -> Advice:
        with progress_bar("tracing for advice", None, "steps") as bar:  # how many, only they can tell
            return advise(question, found, at, traced=bar.update)

    Output(question, found, advise_on).show()
    if question.plan.picture is None:
        return
    path, first = Path(question.plan.picture).resolve(), found.capacities[0]
    try:
        drawn = draw_forecast(path, first, frontier(found), heading(question, first, found.trains))
    except OSError as error:
        raise AdaptiveError(f"cannot write picture '{path}': {reason(error)}; choose another place") from error
    if drawn is not None:
        print(f"picture: {drawn}", file=sys.stderr)


if __name__ == "__main__":
    launch.run_without_training(main, keys=PLAN_KEYS)
