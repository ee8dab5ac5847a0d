"""`tune-adaptive validate` accepts and refuses the same configs as a run, with the same messages."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recipes.endings import test_errors
from tests.unit.checkpoints.checkpoint_files import save
from torchtune_adaptive.cli.main import main
from torchtune_adaptive.config.registry import FULL, LORA, PLAN, RECIPES, NamedConfig, Recipe, supported_configs

DEMO = {"full": "adaptive/demo/full", "lora": "adaptive/demo/lora"}
REPORTED_BY_THE_RUN = {
    "checkpointer.checkpoint_files=[none.pt]": "the demo's checkpointer generates missing files",
    "checkpointer=torchtune.NoCheckpointer": "the component does not exist, so its message differs",
    "output_dir=/proc/none": "validate writes no file",
    **{
        f"checkpointer.{override}": "a run refuses them in its first second"
        for override in ("model_type=LAMA", "checkpoint_files=x", "checkpoint_files=null", "checkpoint_files=[]")
    },
}
SECTION = "tests.unit.cli.test_validate."

PACKED = ("adaptive.token_budget=64", "use_maximum_batch_size=False", "adaptive.padding=False", "dataset.packed=True")
IN_BACKWARD = ("optimizer_in_bwd=True", "clip_grad_norm=null", "gradient_accumulation_steps=1")

Ended = tuple[int, str, str]
Validate = Callable[..., Ended]


def cases(test: Callable[..., None]) -> list[tuple[str, list[str]]]:
    """Return a third of the overrides in a test of the recipes, with their expected errors."""
    (listed,) = (mark.args[1] for mark in test.pytestmark if "override" in mark.args[0])  # type: ignore[attr-defined]
    return [(override, parts) for override, parts in listed if override not in REPORTED_BY_THE_RUN][::3]


VALUES = [
    *cases(test_errors.test_wrong_value_is_named_with_the_allowed_values),
    *cases(test_errors.test_bad_override_is_named),
]
PARTS = cases(test_errors.test_component_that_cannot_be_built_is_named)


@pytest.fixture
def validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Validate:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def ended(*words: str) -> Ended:
        with pytest.raises(SystemExit) as left:
            main(["validate", *words])
        return int(str(left.value.code)), *capsys.readouterr()

    return ended


def assert_refused(ended: Ended, parts: list[str]) -> None:
    status, out, errors = ended
    assert status == 1, out
    message = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert any(all(part in line for part in parts) for line in message), errors


def test_trainable_config_is_accepted_and_leaves_no_files(validate: Validate, tmp_path: Path) -> None:
    for kind in DEMO:
        status, out, errors = validate(DEMO[kind], "--here", "--ranks", "2", "epochs=3")
        assert (status, errors) == (0, ""), errors
        command = f"adaptive_{kind}_finetune_distributed would start with {DEMO[kind]} epochs=3"
        assert out == f"ok: {command} (its samples were not read)\n"
    assert list(tmp_path.iterdir()) == []


def test_arguments_passed_through_by_a_dataset_are_reported_as_unchecked(validate: Validate) -> None:
    other = "dataset._component_=torchtune.datasets.alpaca_dataset"
    status, out, _ = validate(DEMO["full"], other, "dataset.split=train")
    assert status == 0
    assert "note: dataset.samples: not checked, since alpaca_dataset accepts any argument" in out


@pytest.mark.parametrize(("override", "parts"), VALUES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_error_of_a_run_is_reported_with_the_same_message(validate: Validate, override: str, parts: list[str]) -> None:
    if override.startswith("--"):
        assert validate(DEMO["full"], override)[0] == 2
    else:
        assert_refused(validate(DEMO["full"], "--here", override), parts)


@pytest.mark.parametrize(("override", "parts"), PARTS, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_component_that_cannot_be_built_is_refused(validate: Validate, override: str, parts: list[str]) -> None:
    """Under its key. Unbuilt components are checked against their signatures, with other messages."""
    assert_refused(validate(DEMO["full"], *override.split()), parts[:1])


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["adaptive.recover_from_oom=True", *IN_BACKWARD], ["a step cannot be repeated"]),
        (["adaptive.deal=True"], ["adaptive.deal is True", "token_budget is null"]),
        ([*PACKED], ["the dataset is packed"]),
        (["adaptive.sequence_length=4096"], ["adaptive.sequence_length is 4096", "at most 2048"]),
        (["adaptive.memory_limit=[1GiB,2GiB,3GiB]", "--ranks=2"], ["3 amounts for 2 ranks"]),
        (["adaptive.memory_limit=lots"], ["adaptive.memory_limit", "'lots'"]),
        (["batch_sise=4"], ["batch_sise is not a known key: did you mean batch_size?"]),
        (["batch_increase_function=nowhere.f"], ["batch_increase_function is 'nowhere.f'"]),
        ([f"batch_increase_function={SECTION}shrinking"], ["batch_increase_function"]),
        (["lr_scheduler._component_=torch.optim.lr_scheduler.StepLR"], ["lr_scheduler"]),
        (["dataset.colour=red"], ["dataset.colour", "has no such argument"]),
        (["dataset.samples=many"], ["dataset.samples is 'many', but demo_dataset takes int"]),
        (["dataset.packed=abc"], ["dataset.packed"]),
        (["metric_logger=abc"], ["metric_logger._component_ is 'abc', which is not a class or function"]),
        (["checkpointer=abc"], ["checkpointer._component_ is 'abc', which is not a class or function"]),
        (["checkpointer.checkpoint_files=5"], ["checkpointer.checkpoint_files is 5: allowed is a list of names"]),
        (["optimizer.lr=.inf"], ["optimizer.lr is inf: allowed is a finite number"]),
    ],
    ids=lambda value: value[0][:40],
)
def test_contradictions_are_refused(validate: Validate, overrides: list[str], parts: list[str]) -> None:
    assert_refused(validate(DEMO["full"], *overrides), parts)


def shrinking(epoch: int, current_batch_size: int) -> int:
    return -current_batch_size


def keys_of_errors(errors: str) -> list[str]:
    return [line.split()[1].rstrip(":") for line in errors.splitlines() if line.startswith("error: ")]


def test_errors_of_one_section_do_not_hide_others(validate: Validate) -> None:
    at_the_top = ("batch_size=0", "epochs=0", "dtype=fp8")
    others = ("adaptive.serch=1", "adaptive.deal=7", "dataset=nowhere.x", "batch_increase_function=nowhere.f")
    status, _, errors = validate(DEMO["full"], *at_the_top, *others)
    assert status == 1
    keys = ["dtype", "batch_size", "epochs", "adaptive.serch", "adaptive.deal"]
    assert keys_of_errors(errors) == [*keys, "dataset._component_", "batch_increase_function"]


def test_answers_without_space_for_a_prompt_are_refused_early(validate: Validate) -> None:
    ended = validate("adaptive/demo/ppo", "max_generated_tokens=512")
    assert_refused(ended, ["max_generated_tokens is 512", "set it to 511 or less"])
    assert_refused(validate("adaptive/demo/ppo", "loss.epsilon=-1"), ["loss.epsilon is -1"])
    assert validate("adaptive/demo/ppo", "max_generated_tokens=496")[0] == 0


def test_fewer_samples_than_an_iteration_are_refused_for_known_ranks(validate: Validate) -> None:
    message = ["num_steps is 100", "one iteration takes 128 samples", "4 ranks"]
    assert_refused(validate("adaptive/demo/ppo", "num_steps=100", "--ranks", "4"), message)
    assert validate("adaptive/demo/ppo", "num_steps=100", "--ranks", "2")[0] == 0


def test_impossible_replicas_are_refused_first_by_their_keys(validate: Validate) -> None:
    replicas = ("data_parallel_replicate_dim=2", "optimizer.fused=True")
    _, _, errors = validate(DEMO["full"], *replicas, "tensor_parallel_dim=2")
    assert "cannot be combined" in errors
    assert "tensor_parallel_plan" not in errors
    _, _, errors = validate(DEMO["lora"], *replicas, "model.quantize_base=True", "model.lora_rank=0")
    assert keys_of_errors(errors)[:2] == ["data_parallel_replicate_dim", "model.lora_rank"], "no component was built"


def test_machine_dependent_errors_are_notes_unless_here_is_given(validate: Validate) -> None:
    status, out, errors = validate("llama3_2/1B_full", "device=cuda:99")
    assert (status, errors) == (0, "")
    notes = [line for line in out.splitlines() if line.startswith("note: on this machine: ")]
    assert len(notes) == 3
    assert all(key in note for key, note in zip(("tokenizer", "device", "checkpoint_dir"), notes, strict=True))
    status, out, errors = validate("llama3_2/1B_full", "device=cuda:99", "--here")
    assert status == 1
    assert errors.count("error: ") == 3


@pytest.mark.parametrize("config", [*supported_configs()][::6], ids=lambda config: config.name)
def test_supported_configs_are_accepted_without_their_weights(validate: Validate, config: NamedConfig) -> None:
    status, out, errors = validate(config.name, "--recipe", config.recipe, "output_dir=out")
    assert (status, errors) == (0, "")
    assert "note: on this machine: tokenizer" in out or "demo" in config.name


def test_package_needed_by_a_component_may_be_installed_elsewhere(validate: Validate, tmp_path: Path) -> None:
    (tmp_path / "needs_another.py").write_text("import no_such_package_of_anybody\n")
    config = (DEMO["full"], "model=needs_another.model", "tokenizer=needs_another.tokenizer")
    status, out, errors = validate(*config)
    assert (status, errors) == (0, "")
    assert out.count("No module named 'no_such_package_of_anybody'") == 2
    assert_refused(validate(*config, "--here"), ["model", "no_such_package_of_anybody"])


def test_folder_with_checkpoints_or_in_use_is_refused(
    validate: Validate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "out", "epoch_0", serial=0)
    into = (DEMO["full"], "output_dir=out", "overwrite_output_dir=False")
    assert_refused(validate(*into), ["contains checkpoints of an earlier run (epoch_0)"])
    assert_refused(validate(*into, "resume_from_checkpoint=auto"), ["in the run whose checkpoints are in"])
    assert validate(*into[:2], "overwrite_output_dir=True")[0] == 0
    monkeypatch.setattr("torchtune_adaptive.cli.check_config.lock_holder", lambda _: "process 7 on node3")
    assert_refused(validate(*into[:2]), ["is in use by process 7 on node3"])


@pytest.mark.parametrize("recipe", [each for each in RECIPES.values() if each is not PLAN], ids=lambda each: each.name)
def test_users_file_is_checked_for_the_recipe_it_names_or_whose_keys_it_has(
    validate: Validate, tmp_path: Path, recipe: Recipe
) -> None:
    text = next(each.path for each in supported_configs() if each.recipe == recipe.name).read_text()
    mine, note = tmp_path / "mine.yaml", f"mine.yaml does not name its recipe; assuming {recipe.name} from "
    for content in (text, "\n".join(line for line in text.splitlines() if not line.startswith("#"))):
        mine.write_text(content)
        status, out, errors = validate(str(mine))
        assert (status, errors) == (0, "")
        assert out.endswith(f"ok: {recipe.name} would start with {mine} (its samples were not read)\n")
        assert (note in out) == (content != text)
    if recipe == FULL:
        assert_refused(validate(str(mine), "--recipe", LORA.name), ["model.lora_attn_modules is missing"])


def test_changed_copy_of_a_recipe_is_checked_as_the_original_recipe(validate: Validate, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["cp", LORA.name, str(tmp_path / "mine.py")])
    status, out, errors = validate(DEMO["lora"], "--recipe", "mine.py")
    assert (status, errors) == (0, "")
    assert "ok: mine.py would start" in out
    assert_refused(validate(DEMO["full"], "--recipe", "mine.py"), ["model.lora_attn_modules is missing"])
    (tmp_path / "mine.py").write_text("print()")
    assert_refused(validate(DEMO["full"], "--recipe", "mine.py"), ["does not call a function that reads settings"])
    (tmp_path / "mine.py").write_text("\nread_full_settings(")
    assert_refused(validate(DEMO["full"], "--recipe", "mine.py"), ["--recipe mine.py, line 2: '(' was never closed"])
    assert_refused(validate(DEMO["full"], "--recipe", f"{LORA.name}x"), [f"did you mean {LORA.name}?"])


def test_data_files_must_exist(validate: Validate, tmp_path: Path) -> None:
    component = "dataset._component_=torchtune.datasets.chat_dataset"
    others = ("dataset.source=json", "dataset.conversation_column=a", "dataset.conversation_style=sharegpt")
    own = ("~dataset.samples", "dataset.packed=False", component, *others)
    (tmp_path / "there.json").touch()
    for files in ("there.json", "[there.json]", "{train: there.json}", "'*.json'", "https://example.org/data.json"):
        status, _, errors = validate(DEMO["full"], "--here", *own, f"dataset.data_files={files}")
        assert (status, errors) == (0, ""), files
    for files in ("none.json", "[there.json,none.json]", "{train: none.json}"):
        ended = validate(DEMO["full"], "--here", *own, f"dataset.data_files={files}")
        assert_refused(ended, ["dataset.data_files is 'none.json', which does not exist"])
    elsewhere = validate(DEMO["full"], *own, "dataset.data_files=none.json")[1]
    assert "note: on this machine: dataset.data_files" in elsewhere


def test_component_next_to_the_config_is_found(validate: Validate, tmp_path: Path) -> None:
    (tmp_path / "next_to_the_config.py").write_text(
        "from torchtune_adaptive.demo.dataset import demo_dataset as mine\n"
    )
    status, _, errors = validate(DEMO["full"], "dataset._component_=next_to_the_config.mine")
    assert (status, errors) == (0, "")


def test_config_of_adaptive_plan_is_checked(validate: Validate) -> None:
    question = ("adaptive/llama3_1/8B_full", "--recipe", PLAN.name)
    assert validate(*question, "world_size=8", "memory_limit=h100")[0] == 0
    assert_refused(validate(*question, "world_size=8"), ["memory_limit is null"])
    assert_refused(validate(*question, "world_size=0", "memory_limit=h100"), ["world_size is 0"])
    assert_refused(validate(*question, "memory_limit=h10"), ["cannot read 'h10'", "h100"])
    assert_refused(validate(*question, "memory_limit=2GiB", "world_size=8"), ["no memory remains for tensors"])
    assert_refused(validate(*question, "memory_limit=h100", "device=cpu"), ["device is cpu", "device=cuda"])
    both = ("adaptive.token_budget=auto", "use_maximum_batch_size=True")
    assert_refused(validate(*question, "memory_limit=h100", *both), ["use_maximum_batch_size is True"])


def test_config_of_an_unsupported_recipe_is_refused(validate: Validate) -> None:
    assert_refused(validate("llama2/7B_lora_single_device"), ["lora_finetune_single_device", "--recipe"])
