"""What fits in a microbatch, how a step is cut so that it does, and which limit comes next. No torch."""

from torchtune_adaptive.limits.dealing import deal
from torchtune_adaptive.limits.governor import CompletedStep, Governor
from torchtune_adaptive.limits.limit import Limit, Microbatch, RowLimit, SurfaceLimit, TokenLimit
from torchtune_adaptive.limits.padded_plan import Plan, load_of, padded_tokens, plan_step, spread, tokens_of_joined
from torchtune_adaptive.limits.surface import Surface, fit_surface
from torchtune_adaptive.limits.unpadded_plan import join_step, spread_joined

__all__ = [
    "CompletedStep",
    "Governor",
    "Limit",
    "Microbatch",
    "Plan",
    "RowLimit",
    "Surface",
    "SurfaceLimit",
    "TokenLimit",
    "deal",
    "fit_surface",
    "join_step",
    "load_of",
    "padded_tokens",
    "plan_step",
    "spread",
    "spread_joined",
    "tokens_of_joined",
]
