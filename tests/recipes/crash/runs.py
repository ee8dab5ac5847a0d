"""The runs to kill: small enough that a kill costs seconds, long enough to include every kind of save."""

import os
import resource
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from tests.ranks import PATIENCE, RankFailed, RanksHung, patience, run_on_ranks
from tests.recipes.crash import hook
from tests.recipes.crash.hook import KILL, ORDER, Order, Point, write_order
from tests.recipes.ppo.rollouts import ppo_config
from tests.recipes.running import COMMAND_MARK, OURS, demo_config, end_marked, environment, marked, start_as_command
from torchtune_adaptive.cli.main import Condition, condition_of

ROOT = Path(__file__).parents[3]
EPOCHS, STEPS_PER_EPOCH = 4, 5
STEPS = EPOCHS * STEPS_PER_EPOCH
SAVE_EVERY, KEEP = 2, 2
SAVES = sorted({*range(SAVE_EVERY, STEPS, SAVE_EVERY), *range(STEPS_PER_EPOCH, STEPS + 1, STEPS_PER_EPOCH)})
"""The steps after which a checkpoint exists."""
FIRST_PRUNING = KEEP * SAVE_EVERY
"""The first step whose save prunes."""
ROWS = 2
"""Also the number of microbatches of a step, and of updates per iteration of PPO."""
DROPOUT = (
    "model.attn_dropout=0.1",
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=2",
)
EXTRA = {
    "rows": (),
    "tokens": ("adaptive.token_budget=256",),
    "searched": ("use_maximum_batch_size=True", "adaptive.memory_limit=64MiB", "adaptive.max_batch_size=4"),
    "dropout": DROPOUT,
    "tokens and dropout": ("adaptive.token_budget=256", "model.lora_dropout=0.1"),
    "in backward": ("optimizer_in_bwd=True", "clip_grad_norm=null", "batch_size=4", "gradient_accumulation_steps=1"),
    "adapters": ("save_adapter_weights_only=True",),
    # the second epoch has twice as many samples per step
    "growing": (
        *(f"max_steps_per_epoch={STEPS_PER_EPOCH}", f"dataset.samples={STEPS_PER_EPOCH * 16}"),
        *("batch_increase_function=tests.recipes.finetuning.test_runs.double", "adaptive.max_batch_size=4"),
        *DROPOUT,
    ),
    "validated": (
        *("run_val_every_n_steps=1", "dataset_val._component_=torchtune_adaptive.demo.dataset.demo_dataset"),
        *("dataset_val.samples=5", "dataset_val.seed=7"),
    ),
}
"""Overrides of variants."""
FORKED, TUNE_RUN, LAUNCHED = "forked", "tune run", "tune run with a launcher"
"""How a run starts: on forked ranks; by the command, with a launcher for several ranks; or always with a launcher."""
IN_PROCESS_S, TUNE_RUN_S, ENDS_S = 90, 200, 10
KILLED, FINISHED, FAILED, HUNG = "killed", "finished", "failed", "hung"
STOPPED = "stopped"
"""Received a signal before it was finished, and ended."""


@dataclass(frozen=True)
class Variant:
    kind: str
    """A key of running.OURS."""
    ranks: int
    limit: str = "rows"
    """A key of EXTRA."""

    def __str__(self) -> str:
        return f"{self.kind}/{self.ranks}/{self.limit}"

    @property
    def stages(self) -> int:
        """Return how often a step calls a StepRunner."""
        return 5 + 2 * ROWS if self.kind == "full_ppo" else 2 if self.kind.endswith("_dpo") else 1


def folder_of(variant: Variant, parent: Path) -> Path:
    """Return the folder of all runs of a variant, which share their initial weights."""
    return parent / str(variant).replace("/", "-")


def safe_after(step: int) -> int:
    """Return the step that must be on disk once `step` is done, so that a kill loses only later steps."""
    return max((save for save in SAVES if save < step), default=0)


@dataclass(frozen=True)
class Start:
    """How to start a run; all its starts use the same command."""

    variant: Variant
    folder: Path
    way: str = FORKED

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def arguments(self) -> list[str]:
        return ["--config", str(self.folder / "config.yaml")]


def prepared(variant: Variant, folder: Path, *overrides: str, way: str = FORKED) -> Start:
    """Write the config of a run. A step of PPO is an iteration, an epoch one pass over the prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    samples = STEPS_PER_EPOCH * ROWS * variant.ranks
    common = (
        "metric_logger._component_=tests.recipes.crash.hook.WatchedLogger",
        *("clip_grad_norm=1.0", "shuffle=True", "resume_from_checkpoint=auto"),
        *(f"save_every_n_steps={SAVE_EVERY}", f"keep_last_n_checkpoints={KEEP}"),
        *(f"batch_size={ROWS}", f"gradient_accumulation_steps={ROWS}"),
        *EXTRA[variant.limit],
        *overrides,
    )
    if variant.kind == "full_ppo":
        cfg = ppo_config(
            folder,
            *(f"dataset.samples={samples}", f"num_steps={EPOCHS * samples}", "max_generated_tokens=4"),
            *(f"ppo_batch_size={ROWS}", f"ppo_epochs={ROWS}", "forward_batch_size=1", "optimizer.momentum=0.9"),
            *common,
        )
    else:
        sizes = (f"dataset.samples={samples * ROWS}", "tokenizer.max_seq_len=96", f"epochs={EPOCHS}")
        cfg = demo_config(variant.kind, folder, *sizes, *common)
    OmegaConf.save(cfg, folder / "config.yaml")
    return Start(variant, folder, way)


@dataclass(frozen=True)
class Life:
    ended: str
    """KILLED, STOPPED, FINISHED, FAILED or HUNG."""
    where: str = ""
    """The operation at which the run was struck."""
    output: str = ""
    seconds: float = 0.0
    cleanly: bool = False
    """Exited by itself with status 0."""


def live(start: Start, number: int, point: Point | None, after_step: int, *, file_bytes: int | None = None) -> Life:
    """Run the same command again and strike it at this point; limit the size of files to `file_bytes`."""
    notes = start.folder / "lives" / f"{number:04}"
    notes.mkdir(parents=True)
    order, began = Order(point, str(start.out), str(notes), after_step), time.monotonic()
    why, cleanly = _on_ranks(start, order, file_bytes) if start.way == FORKED else _by_command(start, order)
    where, output = order.struck_at(), why
    output += "".join(f"\n[{file.name}] {file.read_text(errors='replace')[-12_000:]}" for file in notes.glob("output*"))
    ended = HUNG if why.startswith(HUNG) else FINISHED if cleanly else KILLED if where else FAILED
    if point is not None and point.blow != KILL and where and ended != HUNG:
        # a run that is asked to end prints how it ended: its status does not show it
        condition, (reason, *_) = condition_of(start.out)
        nothing_begun = reason.startswith(str(start.out))
        can_continue = nothing_begun or condition is Condition.CAN_CONTINUE
        ended = STOPPED if can_continue else FINISHED if condition is Condition.FINISHED else FAILED
    return Life(ended, where, output, time.monotonic() - began, cleanly)


def _on_ranks(start: Start, order: Order, file_bytes: int | None) -> tuple[str, bool]:
    try:
        run_on_ranks(start.variant.ranks, _rank, start, order, file_bytes, timeout_s=IN_PROCESS_S, in_group=False)
    except RankFailed as error:
        return str(error), False
    except RanksHung as error:
        return f"{HUNG}: {error}", False
    return "", True


def _rank(start: Start, order: Order, file_bytes: int | None) -> None:
    rank = int(os.environ["RANK"])
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    hook.install(order, rank)
    ended = start_as_command(start.variant.kind, start.arguments, Path(order.notes) / f"output{rank}")
    if ended.status:
        raise RuntimeError(f"ended with status {ended.status}")


def _by_command(start: Start, order: Order) -> tuple[str, bool]:
    mark, variant = uuid.uuid4().hex, start.variant
    launcher = ["--nproc_per_node", str(variant.ranks)] if variant.ranks > 1 or start.way == LAUNCHED else []
    tune = str(Path(sys.executable).parent / "tune")
    path = f"{ROOT / 'tests' / 'recipes' / 'crash' / 'startup'}{os.pathsep}{ROOT}"
    variables = {**environment(), COMMAND_MARK: mark, ORDER: write_order(order), "PYTHONPATH": path}
    with (Path(order.notes) / "output").open("w") as output:
        process = subprocess.Popen(
            [tune, "run", *launcher, OURS[variant.kind][0], *start.arguments],
            cwd=start.folder,
            env=variables,
            stdout=output,
            stderr=output,
        )
        try:
            process.wait(timeout=TUNE_RUN_S * patience() / PATIENCE)
            deadline = time.monotonic() + ENDS_S * PATIENCE
            while marked(COMMAND_MARK, mark) and time.monotonic() < deadline:  # ranks end after a killed launcher
                time.sleep(0.1)
        except subprocess.TimeoutExpired:
            return f"{HUNG}: still running after {TUNE_RUN_S} s", False
        finally:
            left = end_marked(COMMAND_MARK, mark)
            process.wait(timeout=10)
    return (f"{HUNG}: left running: {left}", False) if left else ("", process.returncode == 0)
