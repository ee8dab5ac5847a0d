"""What the log tells of a preference step, under torchtune's names."""

from __future__ import annotations

from collections.abc import Mapping

from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.step.reports import StepResult
from torchtune_adaptive.tune.parts.preference import ANSWERS, PAIRS
from torchtune_adaptive.tune.run.fitting import say
from torchtune_adaptive.tune.start.sections import AdaptiveConfig
from torchtune_adaptive.tune.start.settings import Settings


def check_preferences(adaptive: AdaptiveConfig) -> None:
    """Refuses what no stage of preference training can do yet."""
    if adaptive.search == "static":
        raise ConfigError(
            "adaptive.search is static, but adaptive_plan does not predict preference training yet: set it to linear, "
            "which measures"
        )

    if adaptive.precompute_reference and adaptive.oversize == "truncate":
        raise ConfigError(
            "adaptive.precompute_reference is True and adaptive.oversize is truncate: what the reference says of a "
            "whole sample does not hold for its beginning; set adaptive.oversize to error, and lower "
            "tokenizer.max_seq_len, or set adaptive.precompute_reference: False"
        )


def check_no_reference(adaptive: AdaptiveConfig) -> None:
    """Refuses what only preference training has."""
    if adaptive.precompute_reference:
        raise ConfigError(
            "adaptive.precompute_reference is True, but finetuning has no reference: set it to False, or train with "
            "adaptive_full_dpo_distributed or adaptive_lora_dpo_distributed"
        )


class PreferenceFigures:
    """Rewards, log-probabilities and logits of the answers: means over the pairs of a step, on all ranks."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._said = False

    def of(self, reference: StepResult | None, result: StepResult) -> dict[str, float]:
        """Collective in nothing, but it waits for the GPU."""
        sums = {name: float(value) for name, value in result.sums.items()}
        pairs = max(1.0, sums[PAIRS])
        figures = {name: sums[name] / pairs for name in ("rewards/chosen", "rewards/rejected", "rewards/accuracies")}
        figures["rewards/margins"] = figures["rewards/chosen"] - figures["rewards/rejected"]
        figures.update({f"log_probs/{answer}": sums[f"log_probs/{answer}"] / pairs for answer in ANSWERS})
        figures.update(self._logits(sums, result))
        if reference is not None:
            figures["reference_microbatches"] = reference.microbatches
            figures["reference_microbatch_rows"] = reference.load.most_rows
        return figures

    def _logits(self, sums: Mapping[str, float], result: StepResult) -> dict[str, float]:
        """Mean logits: over padded positions, microbatch by microbatch, where the split is torchtune's; else over
        tokens, which no split changes."""
        if self._is_stock_split(result) and f"padded_logits/{ANSWERS[0]}" in sums:
            return {f"logits/{a}": sums[f"padded_logits/{a}"] / max(1.0, sums["microbatches"]) for a in ANSWERS}
        if not self._said:
            say(
                "logits/chosen and logits/rejected are means over tokens where a step is not cut as torchtune would "
                "cut it: its own are means over padded positions, which the cut changes"
            )
            self._said = True
        return {f"logits/{a}": sums[f"logits/{a}"] / max(1.0, sums[f"tokens/{a}"]) for a in ANSWERS}

    def _is_stock_split(self, result: StepResult) -> bool:
        settings = self._settings
        cut = result.load.most_rows, result.microbatches
        return cut == (settings.batch_size, settings.gradient_accumulation_steps)
