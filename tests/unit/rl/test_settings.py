"""Configs of PPO: one error names every line to change; unsupported options are refused."""

from typing import cast

import pytest
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.command_line import read_config
from torchtune_adaptive.config.registry import config_files
from torchtune_adaptive.errors import AdaptiveError
from torchtune_adaptive.rl.settings import PPO_KEYS, read_ppo_settings

STOCK, OURS = "mistral/7B_full_ppo_low_memory", "adaptive/mistral/7B_ppo"
DEMO = "adaptive/demo/ppo"


def config(name: str, *overrides: str) -> DictConfig:
    return read_config(config_files()[name], overrides)


def refused(name: str, *overrides: str) -> str:
    with pytest.raises(AdaptiveError) as error:
        read_ppo_settings(config(name, *overrides))
    return str(error.value)


def test_one_error_names_both_lines_of_torchtunes_config_to_change() -> None:
    message = refused(STOCK)
    assert "optimizer_in_bwd is True, which PPO does not support: allowed is False" in message
    assert "bitsandbytes.optim.PagedAdamW" in message
    assert "torch.optim.AdamW" in message


def test_torchtunes_config_with_these_changes_is_accepted_and_equals_ours() -> None:
    changed = config(STOCK, "optimizer_in_bwd=False", "optimizer._component_=torch.optim.AdamW")
    check_keys(changed, PPO_KEYS, log=False)
    settings, ppo = read_ppo_settings(changed)
    assert (settings.samples_per_step, ppo.updates, ppo.iterations(ranks=4)) == (128, 1, 19)
    assert settings.config.model == changed.policy_model
    ours, stock = (cast(dict[str, object], OmegaConf.to_container(config(name))) for name in (OURS, STOCK))
    differ = {key for key in ours.keys() | stock.keys() if ours.get(key) != stock.get(key)}
    assert differ == {"output_dir", "optimizer", "optimizer_in_bwd", "use_maximum_batch_size"}
    read_ppo_settings(config(OURS))


REFUSED = [
    ("epochs=2", "epochs is 2, but PPO trains for num_steps: remove it"),
    ("tensor_parallel_dim=2", "tensor_parallel_dim is 2"),
    ("fsdp_cpu_offload=True", "fsdp_cpu_offload is True, which PPO does not support: allowed is False"),
    ("enable_activation_offloading=True", "enable_activation_offloading is True"),
    ("optimizer_in_bwd=True", "optimizer_in_bwd is True, which PPO does not support"),
    ("temperature=0", "temperature is 0"),
    ("temperature=1e-38", "temperature is 1e-38: allowed is a finite number of at least 1e-06"),
    ("temperature=.inf", "temperature is inf: allowed is a finite number of at least 1e-06"),
    ("num_steps=0", "num_steps is 0"),
    ("stop_token_ids=3", "a list of tokens"),
    ("stop_token_ids=[true]", "a list of tokens"),
    ("dataset.packed=True", "prompts cannot be packed"),
    ("ppo_batch_size=5", "batch_size must be a multiple of ppo_batch_size"),
    ("gradient_accumulation_steps=3", "ppo_batch_size must be a multiple of gradient_accumulation_steps"),
    ("resume_from_checkpoint=True", "allowed is False or auto"),
    ("gamma=2", "gamma is 2: allowed is a number from 0 to 1"),
    ("kl_coeff=1e38", "kl_coeff is 1e+38: allowed is a number from 0 to 1e+12"),
    ("kl_coeff=-0.1", "kl_coeff is -0.1: allowed is a number from 0 to 1e+12"),
    ("reward_penalty=.nan", "reward_penalty is nan: allowed is a number from -1e+12 to 1e+12"),
    ("reward_penalty=-1e38", "reward_penalty is -1e+38: allowed is a number from -1e+12 to 1e+12"),
    ("loss.epsilon=abc", "loss.epsilon is 'abc': allowed is a number of at least 0, or .inf"),
    ("loss.value_clip_range=null", "loss.value_clip_range is null: allowed is a number of at least 0, or .inf"),
    ("loss._component_=torchtune.rlhf.loss.DPOLoss", "loss._component_ is torchtune.rlhf.loss.DPOLoss, but PPO has"),
    ("loss.value_coef=5", "loss.value_coef is not a known key; allowed: epsilon, value_clip_range, value_coeff; did"),
    ("loss.value_coeff=.inf", "loss.value_coeff is inf: allowed is a number from 0 to 1e+12"),
]


@pytest.mark.parametrize(("override", "part"), REFUSED)
def test_unsupported_option_is_refused_by_its_name(override: str, part: str) -> None:
    assert part in refused(DEMO, override)


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.epsilon=.inf", "loss.value_clip_range=.inf", "loss.value_coeff=0", "kl_coeff=0"],
        ["~loss.epsilon"],
        ["optimizer._component_=torch.optim.SGD", "optimizer.fused=False"],
        ["optimizer._component_=torch.optim.Adam"],
        ["use_maximum_batch_size=False", "adaptive={token_budget: auto}"],
        ["use_maximum_batch_size=False", "adaptive={token_budget: 100, padding: true}"],
    ],
)
def test_disabled_clipping_and_zero_coefficients_are_accepted(overrides: list[str]) -> None:
    read_ppo_settings(config(DEMO, *overrides))
