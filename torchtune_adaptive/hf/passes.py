"""The passes before an optimizer step of a trainer that generates: generation, log-probabilities and reward models.

TRL runs them in `_prepare_inputs`. Within `GenerationPasses.recovering`, the engine runs each of them as a stage
without a backward, whose samples are the rows of the batch. If any rank runs out of memory, all ranks repeat the pass
in smaller pieces. TRL then computes rewards and advantages from the results of all rows, as in a healthy run.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from torchtune_adaptive.contexts import override_attributes
from torchtune_adaptive.engine.fsdp import FSDPModule, gathered_bytes, groups_of
from torchtune_adaptive.engine.limits import RowLimit
from torchtune_adaptive.engine.plans import SampleKind
from torchtune_adaptive.engine.probes import TrainingStep, find_max_batch_size
from torchtune_adaptive.engine.ranks import from_all_ranks, rank
from torchtune_adaptive.engine.results import Totals
from torchtune_adaptive.engine.step import StepRunner
from torchtune_adaptive.errors import ConfigError, LimitExhaustedError
from torchtune_adaptive.hf.metrics import only_fsdp_communicates
from torchtune_adaptive.hf.samples import GeneratedRow, share_of_rank
from torchtune_adaptive.hf.steps import Shared
from torchtune_adaptive.report.tables import search_table

logger = logging.getLogger(__name__)

STATE = "adaptive_passes"
"""Key of the limits in `trainer_state.json`, under `stateful_callbacks`."""
TOKENIZED = 256
"""Number of prompts that are tokenized at once, to find the longest."""
FILLER = -1
"""In place of the index of a row: a short row."""
GENERATION, POLICY, REFERENCE = "generation", "log-probabilities", "reference log-probabilities"


class Pass(NamedTuple):
    """A pass over the rows of a batch."""

    call: Callable[[dict[str, Any]], Any]
    """Runs the pass with some rows of the inputs."""
    inputs: dict[str, Any]
    """Tensors with a row per sample, and values that are the same for all rows."""
    short: dict[str, Any]
    """Replaces values of `inputs` in a filler row."""
    longest: Callable[[int, int], dict[str, Any]] = lambda prompt, answer: {}
    """Returns such replacements for a row with these lengths of prompt and answer."""

    def of_longest_row(self, prompt: int, answer: int) -> Pass:
        """Return a pass over one row with this many tokens. One of them is masked, because attention may need less
        memory without a mask."""
        columns = torch.arange(prompt + answer).clamp(max=self.inputs["input_ids"].shape[1] - 1)
        row = {name: value[:1, columns] if _has_rows(value) else value for name, value in self.inputs.items()}
        row["attention_mask"] = torch.ones_like(row["input_ids"])
        row["attention_mask"][:, 0] = 0
        return self._replace(inputs=row | self.longest(prompt, answer))

    def of_rows(self, rows: Sequence[int]) -> Any:
        """Run the pass with these rows, or with the filler."""
        if rows[0] != FILLER:
            return self.call(
                {name: value[[*rows]] if _has_rows(value) else value for name, value in self.inputs.items()}
            )
        filler = {name: value[:1, :2] if _has_rows(value) else value for name, value in self.inputs.items()}
        return self.call(filler | self.short | {"attention_mask": torch.ones_like(filler["input_ids"])})


class GenerationPasses:
    """Runs the passes of one `Trainer.train()` by the engine."""

    def __init__(self, trainer: Any, shared: Shared) -> None:
        self._trainer, self._shared = trainer, shared
        self._runners: dict[str, StepRunner[int]] = {}
        self._first: dict[str, Pass] = {}
        """The first pass of each stage, for a search."""
        self._results: list[Any] = []
        self._warned = False
        self._generates_gathered = True
        """False if all parameters of an FSDP2 model do not fit into memory at once, with one row."""

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Within the context, run the passes of `_prepare_inputs` by the engine, if they can be split into rows.

        Images are not split. With tools or a function of the user, ranks may generate different numbers of times.
        """
        trainer, recovery = self._trainer, self._shared.recovery
        names = "_get_per_token_logps_and_entropies", "_generate_single_turn", "reward_funcs", "use_vllm"
        missing = [name for name in names if not hasattr(trainer, name)]
        if missing and len(missing) < len(names) and recovery.enabled and not self._warned and rank() == 0:
            logger.warning(
                "%s has no %s, so an out-of-memory error in the passes before the loss ends the run",
                type(trainer).__name__,
                ", ".join(missing),
            )
            self._warned = True
        if missing or not recovery.enabled:
            yield
            return
        with ExitStack() as stack:
            rewards = map(self._in_pieces, range(len(trainer.reward_funcs)), trainer.reward_funcs)
            changed: dict[str, Any] = {"reward_funcs": [*rewards]}
            if not trainer._is_vlm:
                score = trainer._get_per_token_logps_and_entropies
                changed["_get_per_token_logps_and_entropies"] = partial(self._score, score)
            if not (trainer._is_vlm or getattr(trainer, "tools", None) or getattr(trainer, "rollout_func", None)):
                changed["_generate_single_turn"] = partial(self._generate_turn, trainer._generate_single_turn)
            stack.enter_context(override_attributes(trainer, **changed))
            yield

    def find_longest(self, row: GeneratedRow) -> GeneratedRow:
        """Collective: return this row with the longest prompt of the dataset, and the longest answer."""
        unknown = ConfigError(
            "samples are generated during training, so the longest is unknown: set per_device_train_batch_size"
        )
        if not hasattr(self._trainer, "max_completion_length"):
            raise unknown
        trainer, dataset = self._trainer, self._trainer.train_dataset
        unit = getattr(trainer, "pad_to_multiple_of", None) or 1
        prompt, answer = row.features["prompt_ids"].shape[1], trainer.max_completion_length
        if hasattr(dataset, "__len__") and not (trainer._is_vlm or getattr(trainer, "environment_factories", None)):
            mine = share_of_rank(len(dataset))
            for start in range(0, len(mine), TOKENIZED):
                tokens, *_ = trainer._tokenize_prompts([dataset[i]["prompt"] for i in mine[start : start + TOKENIZED]])
                prompt = max(prompt, *map(len, tokens))
        self._longest = max(from_all_ranks(-(-prompt // unit) * unit)), -(-answer // unit) * unit
        resized = row.resized(*self._longest).scored(1.0, targets=answer)
        if resized.length != sum(self._longest):  # for example with images
            raise unknown
        resized.features["prompt_mask"][:, 0] = 0  # because attention may need less memory without a mask
        return resized

    def search(self, training: TrainingStep[Any]) -> None:
        """Collective: search for the most rows of each pass, with the optimizer state of a training step in memory."""
        for stage, runner in self._runners.items():
            self._pass = self._first[stage].of_longest_row(*self._longest)
            most_rows = len(self._first[stage].inputs["input_ids"])
            step = TrainingStep(runner=runner, sample=0, update=None, optimizers=[], other_stages=[training])
            found = find_max_batch_size(step, memory=self._shared.memory, max_rows=most_rows, round_to="none")
            self._results.clear()
            if rank() == 0:
                print(search_table(found, step.length, stage), flush=True)
            runner.use_limit(RowLimit(found.rows))
        self._first.clear()

    def to_log(self) -> dict[str, float]:
        """Return the number of recoveries of each pass."""
        return {f"oom_recoveries/{stage}": runner.recoveries for stage, runner in self._runners.items()}

    def _run(self, stage: str, model: nn.Module, most_rows: int, work: Pass) -> list[Any]:
        """Collective: run a pass in pieces of at most `most_rows` rows, and return their results in order."""
        callbacks, self._pass = self._trainer.state.stateful_callbacks, work
        if not self._trainer.model.training:  # whose batches have another size
            stage = f"{stage} in evaluation"
        if (runner := self._runners.get(stage)) is None:
            if self._trainer.adaptive.searches and self._trainer._steps is None:  # the search is in the first step
                self._first[stage] = work
            kind = SampleKind[int](length_of=lambda _: self._pass.inputs["input_ids"].shape[1], filler=lambda _: FILLER)
            options: dict[str, Any] = {"limit": RowLimit(most_rows), "recovery": self._shared.recovery, "stage": stage}
            options["on_attempt"] = lambda *_: self._results.clear()  # of a failed attempt
            runner = self._runners[stage] = StepRunner(model, self._run_rows, kind=kind, **options)
            runner.trains = False
            runner.measure_memory(self._shared.memory)
            if state := callbacks.get(STATE, {}).get(stage):
                runner.load_state_dict(state)
        try:
            with torch.inference_mode(False):
                runner.run(range(len(work.inputs["input_ids"])), step=self._trainer.state.global_step + 1)
            # After a resume, passes that have not run yet keep the state of the checkpoint.
            callbacks[STATE] = callbacks.get(STATE, {}) | {
                name: each.state_dict() for name, each in self._runners.items()
            }
            return [*self._results]
        finally:
            self._results.clear()
            del self._pass

    def _run_rows(self, rows: Sequence[int]) -> Totals:
        with torch.no_grad():
            result = self._pass.of_rows(rows)
        if rows[0] != FILLER:
            self._results.append(result)
        return Totals(torch.zeros(()), 0)

    def _score(self, score: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Collective: TRL's `_get_per_token_logps_and_entropies`, without gradients."""
        names = "input_ids", "attention_mask", "logits_to_keep", "batch_size"
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        if inputs.get("compute_entropy") or inputs.get("compute_aux_loss"):
            return score(model, **inputs)
        most_rows = inputs.pop("batch_size", None) or len(inputs["input_ids"])

        def call(inputs: dict[str, Any]) -> Tensor:
            with only_fsdp_communicates(self._trainer, model):
                log_probs: Tensor = score(model, **inputs)[0]
            return log_probs

        stage, known = (REFERENCE, model) if model is self._trainer.ref_model else (POLICY, self._shared.model)
        work = Pass(call, inputs, {"logits_to_keep": 1}, lambda _, answer: {"logits_to_keep": answer})
        return torch.cat(self._run(stage, known, most_rows, work)), None, None

    def _in_pieces(self, number: int, reward_func: Any) -> Any:
        """Return a reward function that runs a reward model in pieces. Other reward functions stay as they are."""
        if reward_func not in self._shared.recovery.models:
            return reward_func

        def run(**inputs: Any) -> SimpleNamespace:
            work = Pass(lambda inputs: reward_func(**inputs).logits, inputs, {})
            pieces = self._run(f"reward model {number + 1}", reward_func, len(inputs["input_ids"]), work)
            return SimpleNamespace(logits=torch.cat(pieces))

        stand_in = nn.Module()  # TRL looks at the type
        stand_in.forward = run
        return stand_in

    def _generate_turn(self, generate_turn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Collective: TRL's own generation. Reward functions may call `generate` on single ranks."""
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)
        with override_attributes(policy, generate=partial(self._generate, policy, policy.generate)):
            return generate_turn(*args, **kwargs)

    def _generate(self, policy: Any, generate: Callable[..., Any], **inputs: Any) -> Any:
        """Collective: transformers' `generate`. Under FSDP2, each piece gathers all parameters once, because the number
        of tokens may differ between ranks. If these do not fit, parameters are gathered for each token, as in TRL."""
        model, config = self._shared.model, inputs["generation_config"]
        if isinstance(model, FSDPModule) and self._generates_gathered and not self._has_room_for_all_of(model):
            self._do_not_gather("the parameters do not fit into memory at once")
        if not self._generates_gathered:
            return generate(**inputs)

        def call(inputs: dict[str, Any]) -> Tensor:
            with staying_gathered(model), without_checkpointing(policy, self._trainer.args):
                tokens: Tensor = generate(**inputs, synced_gpus=False)
            return tokens

        def one_token(**changed: Any) -> dict[str, Any]:
            short = copy.deepcopy(config)
            short.update(max_new_tokens=1, min_new_tokens=None, **changed)
            return {"generation_config": short}

        def longest(prompt: int, _: int) -> dict[str, Any]:
            """Fill the cache for prompt and answer in chunks as long as the prompt, instead of token by token."""
            of_model = getattr(self._trainer.model, "generation_config", config).use_cache
            grows = config.cache_implementation is None and (of_model if config.use_cache is None else config.use_cache)
            return one_token(prefill_chunk_size=prompt if grows is not False else None)

        work = Pass(call, inputs, one_token(), longest)
        try:
            pieces = self._run(GENERATION, model, len(inputs["input_ids"]), work)
        except LimitExhaustedError as error:
            if not isinstance(model, FSDPModule):
                raise
            self._do_not_gather(error.fact)
            return generate(**inputs)
        if len(pieces) == 1:
            return pieces[0]
        return pad_sequence([*chain(*pieces)], batch_first=True, padding_value=config.pad_token_id)

    def _has_room_for_all_of(self, model: FSDPModule) -> bool:
        """Collective: return True if every rank can gather all parameters, and can then copy the largest group.

        Otherwise, a rank that runs out of memory could not even issue the collectives of its peers.
        """
        if (memory := self._shared.memory) is None:
            return True
        memory.reset_peak()
        sizes = gathered_bytes(model)
        return all(from_all_ranks(memory.budget_bytes - memory.peak_bytes >= sum(sizes) + max(sizes)))

    def _do_not_gather(self, why: str) -> None:
        self._generates_gathered = False
        self._runners.pop(GENERATION, None)
        if rank() == 0:
            logger.warning("%s; from now on, each token gathers the parameters, without recovery", why)


@contextmanager
def staying_gathered(model: nn.Module) -> Iterator[None]:
    """Within the context, a forward of an FSDP2 model leaves all parameters gathered."""
    with ExitStack() as stack:
        for group in groups_of(model) if isinstance(model, FSDPModule) else ():
            stack.enter_context(override_attributes(group, post_forward_mesh_info=None))
        yield


@contextmanager
def without_checkpointing(model: Any, args: Any) -> Iterator[None]:
    """Within the context, activations are not checkpointed, which would switch off the cache of `generate`. TRL does
    the same around its own generation, but not around a probe."""
    if not model.is_gradient_checkpointing:
        yield
        return
    model.gradient_checkpointing_disable()
    try:
        yield
    finally:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
