"""The stages of PPO without data, each beside all four models and whatever the others leave in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torchtune import training

from torchtune_adaptive.patching import replaced
from torchtune_adaptive.prediction.shims import HOST, UPLOAD
from torchtune_adaptive.step.draws import draws
from torchtune_adaptive.step.runner import Totals
from torchtune_adaptive.tune.config.settings import Settings, on_gpu
from torchtune_adaptive.tune.parts.model import Weights, phase_boundaries
from torchtune_adaptive.tune.parts.optimization.optimizer import Optimization
from torchtune_adaptive.tune.parts.process_group import SHARDING, Place
from torchtune_adaptive.tune.rl import generation, passes
from torchtune_adaptive.tune.rl.checkpoints import VALUE_MODEL
from torchtune_adaptive.tune.rl.components import build_ppo_loss
from torchtune_adaptive.tune.rl.models import Models, build_models, build_ppo_optimization
from torchtune_adaptive.tune.rl.prompt_room import check_room
from torchtune_adaptive.tune.rl.rollouts import Rollout, Sequences, kept_of, sequences_of, worst_rollout
from torchtune_adaptive.tune.rl.settings import (
    POLICY_SECTION,
    REFERENCE_FILES,
    VALUE_SECTION,
    PPOSettings,
    read_ppo_settings,
)
from torchtune_adaptive.tune.rl.stages import (
    GENERATE,
    NO_ROOM,
    TRAIN_POLICY,
    TRAIN_VALUE,
    Gathering,
    passes_of,
    samples_of_stage,
    sampling_of,
)
from torchtune_adaptive.tune.trace.fakes import FakeDevice, FakeStep, Rows, resharding
from torchtune_adaptive.tune.trace.inputs import made_up_checkpoint
from torchtune_adaptive.tune.trace.shims import nothing

NO_TOKENIZER = SimpleNamespace(pad_id=0, stop_tokens=(0,))
TRACED_ANSWER = 3
"""Tokens of an answer that are traced: each after the second allocates what that does."""


def ppo_steps(settings: Settings, place: Place, device: FakeDevice) -> dict[str, FakeStep]:
    """The steps of PPO by name, in the order of an iteration."""
    ppo, adaptive = read_ppo_settings(settings.config)[1], settings.adaptive
    with device.in_use():
        checkpoint = {
            training.MODEL_KEY: _weights(settings, POLICY_SECTION),
            VALUE_MODEL: _weights(settings, VALUE_SECTION),
        }
        models = build_models(settings, place, checkpoint, 0, _frozen)
        check_room(models.everything, adaptive, ppo)
        optimization = build_ppo_optimization(settings, models, {}, HOST)
        loss = build_ppo_loss(settings)
    gathering = Gathering(models.policy, stays=True, reshards=settings.fsdp_reshard_after_forward)
    by_tokens = adaptive.token_budget is not None
    in_parts = ppo.gradient_accumulation_steps > 1 or settings.use_maximum_batch_size or by_tokens
    ran = passes_of(models, loss, sampling_of(NO_TOKENIZER, ppo, 0), settings, HOST, gathering)

    def layer_by_layer() -> str:
        gathering.stays = False
        return f"{GENERATE}: {NO_ROOM}"

    def step_of(stage: str, model: nn.Module, run: passes.RolloutPass) -> FakeStep:
        trains, gathers = stage in UPDATES, stage == GENERATE and place.mesh[SHARDING].size() > 1 and gathering.reshards
        return FakeStep(
            settings=settings,
            device=device,
            model=model,
            beside=[each for each in models.everything if each is not model],
            run=_keeping_nothing(run if trains else resharding(model, run), UPLOAD if on_gpu(settings) else HOST),
            update=partial(UPDATES.get(stage, nothing), models, optimization),
            optimizers=optimization.optimizers,
            boundaries=phase_boundaries(model, None),
            rows=_rows_of(stage, ppo, accumulates=trains and in_parts),
            fall_back=layer_by_layer if gathers else None,
            gradients_of=(models.value,) if stage == TRAIN_POLICY else (),
        )

    return {stage: step_of(stage, *of_stage) for stage, of_stage in ran.items()}


def _weights(settings: Settings, key: str) -> Weights:
    """Each time others: where nothing is sharded, a model takes them as they are."""
    weights: Weights = made_up_checkpoint(settings, key)[training.MODEL_KEY]
    return weights


def _frozen(settings: Settings, files: str) -> Weights:
    return _weights(settings, POLICY_SECTION if files == REFERENCE_FILES else VALUE_SECTION)


def _rows_of(stage: str, ppo: PPOSettings, *, accumulates: bool) -> Rows:
    return Rows(
        sample_of=partial(_rollout_of, ppo),
        stand_in=Rollout.stand_in,
        answer_tokens=ppo.max_generated_tokens,
        accumulates=accumulates,
        most=samples_of_stage(stage, ppo),
    )


def _rollout_of(ppo: PPOSettings, tokens: int) -> Rollout:
    """A rollout with a prompt of so many tokens."""
    with no_dispatch():
        return worst_rollout(torch.zeros(tokens, dtype=torch.long), ppo.max_generated_tokens)


def _update_both(models: Models, optimization: Optimization, totals: Totals) -> None:
    optimization.update({"policy": totals.target_tokens, "value": totals.target_tokens})


def _drop_gradients(models: Models, optimization: Optimization, totals: Totals) -> None:
    """They stay for the update, in the stage that follows, which makes its own."""
    models.value.zero_grad(set_to_none=True)


UPDATES = {TRAIN_VALUE: _drop_gradients, TRAIN_POLICY: _update_both}
"""What follows the last microbatch of a stage with a backward."""


def _keeping_nothing(run: passes.RolloutPass, device: torch.device) -> passes.RolloutPass:
    """A pass of whose work on the host nothing is counted but the batches that it makes; these go to the device."""

    def sequences(*args: Any) -> Sequences:
        with no_dispatch():
            made = sequences_of(*args)
        return Sequences(*(torch.clone(each).to(device) for each in vars(made).values()))

    def found(rollouts: Sequence[Rollout], name: str, to: torch.device | None = None) -> Tensor:
        with no_dispatch():
            stacked = kept_of(rollouts, name)
        return torch.clone(stacked) if to is None else torch.clone(stacked).to(device)

    def drawn(*args: Any, **options: Any) -> Tensor:
        with no_dispatch():
            made = draws(*args, **options)
        return torch.clone(made).to(device)

    def without_keeping(rollouts: Sequence[Rollout]) -> Totals:
        with replaced(
            (passes, "sequences_of", sequences),
            (passes, "kept_of", found),
            (passes, "draws", drawn),
            (passes, "keep", nothing),
            (passes, "keep_answers", nothing),
            (generation, "places_of_answers", _first_places),
        ):
            return run(rollouts)

    return without_keeping


def _first_places(longest: int, new: int) -> range:
    return range(longest, longest + min(new, TRACED_ANSWER))
