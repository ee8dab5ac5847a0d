"""All that can be said of a config before a device is touched, in the order in which a run would say it."""

from __future__ import annotations

from functools import partial

from omegaconf import DictConfig, OmegaConf
from torch import nn

from torchtune_adaptive.checkpoints.progress import start_progress
from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.keys import Settings, read_adaptive
from torchtune_adaptive.config.registry import PLAN, PPO, RECIPES
from torchtune_adaptive.engine.search import NEED_RECOVERY
from torchtune_adaptive.errors import ConfigError
from torchtune_adaptive.forecast.question import PLAN_KEYS, read_question
from torchtune_adaptive.rl.settings import read_ppo_settings
from torchtune_adaptive.text import size_for_rank
from torchtune_adaptive.tune import place
from torchtune_adaptive.tune.data import is_packed
from torchtune_adaptive.tune.finetuning import check_cuts, check_sequence_length, checked_loss, obstacle_to_recovery
from torchtune_adaptive.tune.model import check_replicas_of
from torchtune_adaptive.tune.place import mesh_shape
from torchtune_adaptive.tune.sample_exchange import obstacle_to_dealing
from torchtune_adaptive.tune.schedule import check_growth
from torchtune_adaptive.tune.unpadded import is_padded
from torchtune_adaptive.tune.validate.components import (
    check_components,
    check_loss,
    check_models_of_ppo,
    check_pairs,
    check_rollouts,
)
from torchtune_adaptive.tune.validate.findings import Findings
from torchtune_adaptive.tune.validate.places import check_output, check_weights


def check_config(cfg: DictConfig, recipe: str, ranks: int | None, *, here: bool) -> Findings:
    """`ranks`: None where it is not known yet. `here`: this is the machine on which it will run."""
    findings = Findings(here=here)
    if recipe == PLAN.name:
        findings.collect(lambda: check_keys(cfg, PLAN_KEYS, aloud=True))
        findings.collect(lambda: read_question(cfg, "", ()))
        return findings
    training = RECIPES[recipe]
    findings.collect(lambda: check_keys(cfg, training.keys, aloud=True))
    in_adaptive = Findings(here=here)
    well = in_adaptive.collect(lambda: read_adaptive(cfg.get("adaptive"))) is not None
    if not well:  # which hides nothing that is wrong besides
        cfg = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "adaptive"])
    settings, _ = findings.collect(lambda: training.read(cfg)) or (None, None)
    findings.wrong += in_adaptive.wrong
    # where the policy is what the others call the model
    if recipe == PPO.name:
        model = _check_ppo(settings, findings)
    else:
        model = _check_one_model(cfg, settings, findings, of_pairs=training.of_pairs)
    if settings is None or not well:
        return findings
    if recipe == PPO.name:
        findings.collect(lambda: read_ppo_settings(cfg)[1].iterations(ranks or 1))
    _check_together(settings, model, findings)
    _check_ranks(settings, ranks, findings)
    findings.collect(lambda: _check_device(settings, findings))
    findings.collect(lambda: check_weights(cfg, findings))
    findings.collect(lambda: check_output(settings, training.saved_as, findings))
    return findings


def _check_ppo(settings: Settings | None, findings: Findings) -> nn.Module | None:
    """Returns the policy, on the meta device."""
    if settings is None:
        return None
    model = check_components(settings.config, findings, partial(check_rollouts, settings))
    findings.collect(partial(check_models_of_ppo, settings, model))
    return model


def _check_one_model(
    cfg: DictConfig, settings: Settings | None, findings: Findings, *, of_pairs: bool
) -> nn.Module | None:
    model = check_components(
        cfg, findings, partial(check_pairs, cfg) if of_pairs else partial(check_loss, cfg, settings)
    )
    if model is not None and not of_pairs:
        findings.collect(lambda: check_cuts(checked_loss(cfg), model))
    return model


def _check_together(settings: Settings, model: nn.Module | None, findings: Findings) -> None:
    """Values that are well each by itself."""
    findings.collect(lambda: obstacle_to_recovery(settings))
    findings.collect(lambda: _check_search(settings))
    findings.collect(lambda: start_progress(settings, ranks=1))
    findings.collect(lambda: check_growth(settings))
    if model is None:
        return
    findings.collect(lambda: check_sequence_length(model, settings.adaptive))
    findings.collect(lambda: check_replicas_of(model, settings))
    device, packed = findings.collect(lambda: place.device_named(settings)), is_packed(settings.config)
    if device is not None:
        findings.collect(lambda: is_padded(model, settings, device, packed=packed))
    findings.collect(lambda: obstacle_to_dealing(model, settings, packed=packed))


def _check_search(settings: Settings) -> None:
    search, recover = settings.adaptive.search, settings.adaptive.recover_from_oom
    if not settings.use_maximum_batch_size or search not in NEED_RECOVERY or recover:
        return
    why = "adaptive.recover_from_oom is False" if recover is False else obstacle_to_recovery(settings)
    if why is not None:
        raise ConfigError(
            f"adaptive.search is {search}, which runs out of memory on purpose, but {why}: set adaptive.search: linear"
        )


def _check_ranks(settings: Settings, ranks: int | None, findings: Findings) -> None:
    if ranks is None:
        return
    findings.collect(lambda: mesh_shape(settings, ranks))
    if (limits := settings.adaptive.memory_limit) is not None:
        findings.collect(lambda: size_for_rank(limits, 0, ranks, "adaptive.memory_limit"))


def _check_device(settings: Settings, findings: Findings) -> None:
    place.device_named(settings)
    try:
        place.dtype_of(settings, place.device_of(settings))
    except ConfigError as error:
        findings.note_missing_here(str(error))
