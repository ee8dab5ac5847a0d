"""Train with SkyRL. Microbatches are sized by measurement; a batch that runs out of memory is repeated in smaller ones.

Pass the arguments of SkyRL's own entry point, skyrl.train.entrypoints.main_base:

    python examples/skyrl_workers.py trainer.strategy=fsdp trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct ...
"""

import sys
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from torchtune_adaptive.skyrl import adaptive


class Trainer(RayPPOTrainer):
    def build_models(self, *workers: Any) -> None:
        generator = self.cfg.generator
        super().build_models(
            *(
                adaptive(
                    worker,
                    use_maximum_batch_size=True,
                    max_prompt_length=generator.max_input_length,
                    max_generate_length=generator.sampling_params.max_generate_length,
                )
                for worker in workers
            )
        )


class Experiment(BasePPOExp):
    def get_trainer(self, **parts: Any) -> Trainer:
        return Trainer(**parts)


@ray.remote(num_cpus=1)
def train(cfg: SkyRLTrainConfig) -> None:
    Experiment(cfg).run()


if __name__ == "__main__":
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(train.remote(cfg))
