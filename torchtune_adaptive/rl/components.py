"""The loss and the prompts that the config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from torchtune.rlhf.loss import PPOLoss

from torchtune_adaptive.config import components
from torchtune_adaptive.config.keys import Settings
from torchtune_adaptive.engine.ranks import rank
from torchtune_adaptive.errors import ConfigError, SampleError
from torchtune_adaptive.tune.culprits import NamedSamples
from torchtune_adaptive.tune.data import Data, Tokenizer, build_dataset, check_samples, data_of
from torchtune_adaptive.tune.place import Meshes
from torchtune_adaptive.tune.samples import TEXT, Sample


def build_ppo_loss(settings: Settings) -> PPOLoss:
    """torchtune's loss, of which the sums here take the coefficients: its own are means over a microbatch."""
    loss = components.build("loss", settings.config)
    if type(loss) is not PPOLoss:
        raise ConfigError(
            f"loss is {settings.config.loss.get('_component_')}: allowed is torchtune.rlhf.loss.PPOLoss, whose "
            "coefficients are used"
        )
    return loss


def build_prompts(settings: Settings, tokenizer: Tokenizer, mesh: Meshes) -> Data:
    """Samples of text, whose tokens are the prompts."""
    dataset, packed = build_dataset(settings.config, tokenizer)
    samples = NamedSamples(dataset, TEXT)
    samples.complete = _prompt_of_some_tokens
    check_samples(samples, ["tokens"], settings.config, "prompts", "text_completion_dataset")
    return data_of(samples, _collate_nothing, settings, tokenizer, mesh, packed=packed)


def _prompt_of_some_tokens(index: int, sample: Sample) -> Sample:
    """The sample as it is: an answer has to follow something."""
    if isinstance(sample, Mapping) and "tokens" in sample and len(sample["tokens"]) == 0:
        raise SampleError(
            f"sample {index} of the dataset (on rank {rank()}) has no tokens, but a prompt needs at least one: remove "
            "it from the dataset"
        )
    return sample


def _collate_nothing(samples: object) -> NoReturn:
    raise NotImplementedError("rollouts make their own batches")
