"""PPO's config: one error names every line of torchtune's own that has to change; what is not supported is refused."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.registry import config_files
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.rl.settings import PPO_KEYS, read_ppo_settings

STOCK, OURS, DEMO = "mistral/7B_full_ppo_low_memory", "adaptive/mistral/7B_ppo", "adaptive/demo/ppo"


def config(name: str, *overrides: str) -> DictConfig:
    merged = OmegaConf.merge(OmegaConf.load(config_files()[name]), OmegaConf.from_dotlist(list(overrides)))
    assert isinstance(merged, DictConfig)
    return merged


def having(values: dict[str, Any]) -> DictConfig:
    """The demo's config with these values of `adaptive:`."""
    cfg = config(DEMO, "use_maximum_batch_size=False")
    cfg.adaptive = values
    return cfg


def refused(cfg: DictConfig) -> str:
    with pytest.raises(AdaptiveError) as error:
        read_ppo_settings(cfg)
    return str(error.value)


def test_one_error_names_both_lines_of_torchtunes_config_that_have_to_change() -> None:
    told = refused(config(STOCK))
    assert "optimizer_in_bwd is True" in told
    assert "bitsandbytes.optim.PagedAdamW" in told
    assert "optimizer_in_bwd: False" in told
    assert "torch.optim.AdamW" in told


def test_with_these_two_lines_changed_torchtunes_config_is_taken() -> None:
    changed = config(STOCK, "optimizer_in_bwd=False", "optimizer._component_=torch.optim.AdamW")
    check_keys(changed, PPO_KEYS, aloud=False)
    settings, ppo = read_ppo_settings(changed)
    assert (settings.samples_per_step, ppo.updates, ppo.iterations(ranks=4)) == (128, 1, 19)
    assert settings.config.model == changed.policy_model


def test_our_config_has_the_values_of_torchtunes() -> None:
    ours, stock = (OmegaConf.to_container(config(name)) for name in (OURS, STOCK))
    assert isinstance(ours, dict)
    assert isinstance(stock, dict)
    differ = {key for key in ours.keys() | stock.keys() if ours.get(key) != stock.get(key)}
    assert differ == {"output_dir", "optimizer", "optimizer_in_bwd", "use_maximum_batch_size"}
    read_ppo_settings(config(OURS))


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("ppo_batch_size=5", "batch_size must be a multiple of ppo_batch_size"),
        ("gradient_accumulation_steps=3", "ppo_batch_size must be a multiple of gradient_accumulation_steps"),
        ("enable_kv_cache=False", "enable_kv_cache is False"),
        ("resume_from_checkpoint=True", "set it to auto"),
        ("epochs=2", "remove it"),
        ("tensor_parallel_dim=2", "tensor_parallel_dim is 2"),
        ("enable_async_checkpointing=True", "enable_async_checkpointing is True"),
        ("fsdp_cpu_offload=True", "fsdp_cpu_offload is True, which PPO does not support: allowed is False"),
        ("enable_activation_offloading=True", "enable_activation_offloading is True"),
        ("temperature=0", "temperature is 0"),
        ("gamma=2", "gamma is 2"),
        ("num_steps=0", "num_steps is 0"),
        ("stop_token_ids=3", "a list of tokens"),
        ("stop_token_ids=[true]", "a list of tokens"),
        ("kl_coeff=.inf", "kl_coeff is inf: allowed is a finite number"),
        ("kl_coeff=-0.1", "kl_coeff is -0.1: allowed is a finite number of at least 0"),
        ("min_response_length=999", "every answer would be penalised as too short"),
        ("reward_penalty=.nan", "reward_penalty is nan: allowed is a finite number"),
        ("temperature=.inf", "temperature is inf: allowed is a finite number above 0"),
        ("loss.epsilon=abc", "loss.epsilon is 'abc': allowed is a number of at least 0, or .inf"),
        ("loss.epsilon=-1", "loss.epsilon is -1"),
        ("loss.value_clip_range=null", "loss.value_clip_range is null: allowed is a number of at least 0, or .inf"),
        ("loss.value_clip_range=.nan", "loss.value_clip_range is nan"),
        ("loss.value_coeff=.inf", "loss.value_coeff is inf: allowed is a finite number of at least 0"),
        ("optimizer._component_=torch.optim.SGD", "set optimizer.fused: False, or use Adam or AdamW"),
        ("dataset.packed=True", "prompts cannot be packed"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(override: str, part: str) -> None:
    assert part in refused(config(DEMO, override))


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.epsilon=.inf", "loss.value_clip_range=.inf", "loss.value_coeff=0", "kl_coeff=0"],
        ["~loss.epsilon"],
        ["optimizer._component_=torch.optim.SGD", "optimizer.fused=False"],
        ["optimizer._component_=torch.optim.Adam"],
    ],
)
def test_what_clips_nothing_or_costs_nothing_is_taken(overrides: list[str]) -> None:
    cfg = config(DEMO, *(each for each in overrides if not each.startswith("~")))
    for each in overrides:
        if each.startswith("~"):
            del cfg.loss[each.removeprefix("~loss.")]
    read_ppo_settings(cfg)


@pytest.mark.parametrize(
    "values",
    [{"padding": False}, {"deal": True}],
    ids=lambda values: next(iter(values)),
)
def test_what_no_stage_can_do_is_refused_by_its_name(values: dict[str, Any]) -> None:
    assert f"adaptive.{next(iter(values))} is" in refused(having(values))
    for taken in ({}, {"token_budget": "auto"}, {"token_budget": 100, "padding": True}):
        read_ppo_settings(having(taken))


def test_other_recipes_say_whose_config_it_is() -> None:
    with pytest.raises(AdaptiveError, match="adaptive_ppo_full_finetune_distributed"):
        check_keys(config(DEMO), aloud=False)
