"""What the log tells of a preference step, under torchtune's names."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.ranks import rank
from torchtune_adaptive.engine.reports import StepResult
from torchtune_adaptive.life.console import say
from torchtune_adaptive.text import count_of
from torchtune_adaptive.tune.preference_stages import ANSWERS, EMPTY, IDENTICAL, PAIRS, POLICY, REFERENCE

logger = logging.getLogger(__name__)

FLAWS = {EMPTY: "an answer without any label", IDENTICAL: "two identical answers"}


class PreferenceFigures:
    """Rewards, log-probabilities and logits of the answers: means over the pairs of a step, on all ranks."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # a budget takes samples by their length, and may do so in microbatches that only look like torchtune's
        self._by_rows = settings.adaptive.token_budget is None
        self._said = False
        self._told = False
        self._seen = dict.fromkeys((PAIRS, EMPTY, IDENTICAL), 0.0)

    def figures(self, results: Mapping[str, StepResult]) -> dict[str, float]:
        """The figures of a step, from what its stages came to. Waits for the GPU."""
        result, reference = results[POLICY], results.get(REFERENCE)
        sums = {name: float(value) for name, value in result.sums.items()}
        pairs = max(1.0, sums[PAIRS])
        self._count(sums)
        figures = {name: sums[name] / pairs for name in ("rewards/chosen", "rewards/rejected", "rewards/accuracies")}
        figures["rewards/margins"] = figures["rewards/chosen"] - figures["rewards/rejected"]
        figures.update({f"log_probs/{answer}": sums[f"log_probs/{answer}"] / pairs for answer in ANSWERS})
        figures.update(self._logits(sums, result))
        if reference is not None:
            figures["reference_microbatches"] = reference.microbatches
            figures["reference_microbatch_rows"] = reference.load.most_rows
        return figures

    def _count(self, sums: Mapping[str, float]) -> None:
        """Says once that there are pairs of which little is learned; how many there are, an epoch tells."""
        new = sum(sums[flaw] for flaw in FLAWS)
        if new and not any(self._seen[flaw] for flaw in FLAWS) and rank() == 0:
            logger.warning(
                "a pair of the dataset has %s: as in torchtune, such pairs are trained on, although the model learns "
                "little or nothing from them; their number is logged at the end of the epoch",
                " or ".join(what for flaw, what in FLAWS.items() if sums[flaw]),
            )
        self._seen = {name: count + sums[name] for name, count in self._seen.items()}

    def end_epoch(self) -> None:
        """Tells how many pairs there were of which little is learned, once."""
        seen = {name: round(count) for name, count in self._seen.items()}
        counts = [f"{seen[flaw]} {'has' if seen[flaw] == 1 else 'have'} {FLAWS[flaw]}" for flaw in FLAWS if seen[flaw]]
        if counts and not self._told and rank() == 0:
            logger.warning("of %s so far, %s", count_of(seen[PAIRS], "pair"), ", ".join(counts))
        self._told |= bool(counts)

    def _logits(self, sums: Mapping[str, float], result: StepResult) -> dict[str, float]:
        """Mean logits: over padded positions, microbatch by microbatch, where the split is torchtune's; else over
        tokens, which no split changes."""
        if self._is_stock_split(result) and f"padded_logits/{ANSWERS[0]}" in sums:
            return {f"logits/{a}": sums[f"padded_logits/{a}"] / max(1.0, sums["microbatches"]) for a in ANSWERS}
        if not self._said:
            say(
                "logits/chosen and logits/rejected are averaged over real tokens when the split differs from "
                "torchtune's, which also averages over padding"
            )
            self._said = True
        return {f"logits/{a}": sums[f"logits/{a}"] / max(1.0, sums[f"tokens/{a}"]) for a in ANSWERS}

    def _is_stock_split(self, result: StepResult) -> bool:
        settings = self._settings
        cut = result.load.most_rows, result.microbatches
        return self._by_rows and cut == (settings.batch_size, settings.gradient_accumulation_steps)
