"""Configs of PPO: one error names every line to change; unsupported options and prompts without space are refused."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from omegaconf import DictConfig, OmegaConf

from torchtune_adaptive.config.checks import check_keys
from torchtune_adaptive.config.command_line import read_config
from torchtune_adaptive.config.registry import config_files
from torchtune_adaptive.data.loading import CheckedDataset, Longest
from torchtune_adaptive.data.samples import TEXT
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.errors import AdaptiveError, ConfigError, SampleTooLargeError
from torchtune_adaptive.rl.limits import LimitFinder
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


REFUSED = {
    "1": ["tensor_parallel_dim=2"],
    "False": ["fsdp_cpu_offload=True", "enable_activation_offloading=True", "optimizer_in_bwd=True"],
    "False or auto": ["resume_from_checkpoint=True"],
    "a whole number of at least 1": ["num_steps=0"],
    "a finite number of at least 1e-06": ["temperature=0", "temperature=1e-38", "temperature=.inf"],
    "a number from 0 to 1": ["gamma=2"],
    "a number from 0 to 1e+12": ["kl_coeff=1e38", "kl_coeff=-0.1", "loss.value_coeff=.inf"],
    "a number from -1e+12 to 1e+12": ["reward_penalty=.nan", "reward_penalty=-1e38"],
    "a number of at least 0, or .inf, for no clipping": ["loss.epsilon=abc", "loss.value_clip_range=null"],
    "a list of tokens, as numbers or null": ["stop_token_ids=3", "stop_token_ids=[true]"],
}
"""Overrides, by the values that their key allows."""


@pytest.mark.parametrize(
    ("override", "part"),
    [
        *((value, f"allowed is {allowed}") for allowed, values in REFUSED.items() for value in values),
        ("epochs=2", "epochs is 2, but PPO trains for num_steps: remove it"),
        ("dataset.packed=True", "prompts cannot be packed"),
        ("ppo_batch_size=5", "batch_size must be a multiple of ppo_batch_size"),
        ("gradient_accumulation_steps=3", "ppo_batch_size must be a multiple of gradient_accumulation_steps"),
        (
            "loss._component_=torchtune.rlhf.loss.DPOLoss",
            "loss._component_ is torchtune.rlhf.loss.DPOLoss, but PPO has",
        ),
        ("loss.value_coef=5", "loss.value_coef is not a known key"),
    ],
)
def test_unsupported_value_is_refused_with_its_key_and_the_allowed_values(override: str, part: str) -> None:
    message = refused(DEMO, override)
    assert part in message
    assert override.partition("=")[0] in message


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


UNKNOWN, SHORT, LONG = (SimpleNamespace(**each) for each in ({}, {"max_seq_len": 20}, {"max_seq_len": 99}))


def finder_of(loop: Any, models: Mapping[str, Any], new: int) -> LimitFinder:
    stages: Any = {name: SimpleNamespace(model=model) for name, model in models.items()}
    loop.stages = SimpleNamespace(limits={"generate": RowLimit(1)})
    rl: Any = SimpleNamespace(max_generated_tokens=new)
    return LimitFinder(loop, stages, rl)


def test_answers_leave_space_for_a_prompt_in_every_model() -> None:
    loop: Any = SimpleNamespace(run=SimpleNamespace(settings=None), data=None, optimization=None)
    models = {"generate": LONG, "values": SHORT}
    with pytest.raises(ConfigError, match=r"max_generated_tokens is 20, .* 19 or less"):
        finder_of(loop, models, 20)
    finder_of(loop, models, 19)
    finder_of(loop, {"generate": UNKNOWN}, 20)


@pytest.mark.parametrize("cut_at", [None, 16, 8])
def test_prompt_without_space_for_an_answer_is_named_before_training_with_row_limits_too(
    cut_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = read_ppo_settings(config(DEMO, "use_maximum_batch_size=False"))
    dataset = CheckedDataset([{"tokens": [1] * length, "labels": [1] * length} for length in (8, 3, 9)])
    loop: Any = SimpleNamespace(
        run=SimpleNamespace(settings=settings),
        data=SimpleNamespace(dataset=dataset, kind=TEXT, max_seq_len=cut_at),
        optimization=None,
    )
    finder, dataset.truncate_at = finder_of(loop, {"generate": LONG, "values": SHORT}, 12), cut_at
    monkeypatch.setattr(CheckedDataset, "longest", lambda self: Longest(2, len(self[2]["tokens"])))
    if cut_at == 8:
        finder.find(memory=None)
        assert [len(dataset[at]["tokens"]) for at in range(3)] == [8, 3, 8]
        return
    with pytest.raises(SampleTooLargeError, match=r"^sample 2 .* 9 tokens, .* room for 8 .*max_seq_len to 8$"):
        finder.find(memory=None)
