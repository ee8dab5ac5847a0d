"""Finetune with SkyRL's SFTTrainer. A batch that runs out of memory is repeated in smaller microbatches.

Pass the arguments of SkyRL's own entry point, skyrl.train.main_sft:

    python examples/skyrl_sft.py strategy=fsdp model.path=Qwen/Qwen2.5-0.5B-Instruct ...
"""

import sys
from unittest.mock import patch

import ray
from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.sft_config import SFTConfig, build_skyrl_config_for_sft, validate_sft_cfg
from skyrl.train.sft_trainer import SFTTrainer
from skyrl.train.utils.utils import initialize_ray

from torchtune_adaptive.skyrl import adaptive


class Trainer(SFTTrainer):
    def _init_workers(self) -> None:
        # SFTTrainer has no argument for the worker: it imports the class in this method
        with patch.object(fsdp_worker, "PolicyWorker", adaptive(fsdp_worker.PolicyWorker)):
            super()._init_workers()


@ray.remote(num_cpus=1)
def train(cfg: SFTConfig, skyrl_cfg: SkyRLTrainConfig) -> None:
    trainer = Trainer(cfg, skyrl_cfg=skyrl_cfg)
    trainer.setup()
    trainer.train()
    trainer.shutdown()


if __name__ == "__main__":
    cfg = SFTConfig.from_cli_overrides(sys.argv[1:])
    validate_sft_cfg(cfg)
    skyrl_cfg = build_skyrl_config_for_sft(cfg)
    initialize_ray(skyrl_cfg)
    ray.get(train.remote(cfg, skyrl_cfg))
