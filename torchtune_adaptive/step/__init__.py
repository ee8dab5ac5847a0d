"""One step: plan it, attempt it, agree on the outcome; when a rank runs out of memory, shrink the limit and repeat."""

from torchtune_adaptive.step.draws import choose, draws
from torchtune_adaptive.step.reports import Attempt, Report, Reports, StepResult, Totals, exchange
from torchtune_adaptive.step.runner import StepRunner
from torchtune_adaptive.step.samples import SampleKind

__all__ = [
    "Attempt",
    "Report",
    "Reports",
    "SampleKind",
    "StepResult",
    "StepRunner",
    "Totals",
    "choose",
    "draws",
    "exchange",
]
