# No set-up is needed: `make demo` and `make test` create .venv if it does not exist.
# Before a release, run test, test-all and the nightly sweeps faults, crash, soak and versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# what the demos need; READY adds the tools of development
RUNS := $(VENV)/ready-to-run
READY := $(VENV)/ready
PEERS := $(VENV)/ready-to-bench
SITE := $(VENV)/ready-for-docs
# number of test files that run in parallel
WORKERS ?= 2
PYTEST := pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# targets of gpu-rehearsal, in the environment of this Makefile
REHEARSAL := $(MAKE) -C rehearsal VENV=$(CURDIR)/$(VENV) WORKERS=$(WORKERS)
SHELL := bash
.SHELLFLAGS := -o pipefail -ec
# Python compiles a module when it is first imported, if it may write the result; all modules of torch take 40 s
NO_COMPILE := $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
# pip with the pinned versions; prints its downloads, since the environments take several gigabytes
PIP_INSTALL := -m pip install --disable-pip-version-check --progress-bar off --constraint constraints.txt $(NO_COMPILE)
SHOW := | sed -un 's/^ *\(Downloading\|Using cached\) \([^ ]*\).*(\(.*[MG]B\))$$/  \2 (\3)/p; s/^Installing collected.*/  unpacking 6 GB: minutes without output/p'
# one thread per process, since several ranks share the cores
export OMP_NUM_THREADS := 1

# supported torch versions other than the one in constraints.txt; each CUDA build takes 6 GB
VERSIONS ?= 2.13.0 2.14.1

# the frameworks and versions that docs/frameworks.md names
FRAMEWORKS := axolotl llamafactory ray lightning
axolotl := 0.19.0
llamafactory := 0.9.5
ray := 2.60.0
lightning := 2.6.6

# SkyRL's requirements for its FSDP workers
SKYRL := accelerate cloudpathlib datasets fastapi func_timeout hf_transfer jaxtyping loguru orjson pandas pillow polars pybase64 \
	s3fs tensordict torchdata zstandard

.PHONY: demo demo-dpo demo-ppo demo-hf test test-all coverage test-gpu test-frameworks test-hf test-skyrl test-titan test-launchers test-nccl test-null published lint faults versions soak crash bench gpu-day docs dist limits clean

demo: $(RUNS)
	rm -rf runs/demo/full runs/demo/lora
	$(BIN)/tune run --nproc_per_node 2 adaptive_full_finetune_distributed --config adaptive/demo/full
	$(BIN)/tune run --nproc_per_node 2 adaptive_lora_finetune_distributed --config adaptive/demo/lora
	$(BIN)/python examples/draw_run.py runs/demo/full
	$(REHEARSAL) READY=$(CURDIR)/$(RUNS) demo
	@echo 'Next: . $(BIN)/activate, then README, section 1'

# preference training (DPO): of all weights with a reference model, then of adapters, with the base model as the reference
demo-dpo: $(RUNS)
	rm -rf runs/demo/dpo runs/demo/lora_dpo
	$(BIN)/tune run --nproc_per_node 2 adaptive_full_dpo_distributed --config adaptive/demo/dpo
	$(BIN)/tune run --nproc_per_node 2 adaptive_lora_dpo_distributed --config adaptive/demo/lora_dpo

# reinforcement learning (PPO): the mean reward rises from 0.05 to above 0.3
demo-ppo: $(RUNS)
	rm -rf runs/demo/ppo
	$(BIN)/tune run --nproc_per_node 2 adaptive_ppo_full_finetune_distributed --config adaptive/demo/ppo

# transformers' Trainer and, if installed, TRL's SFTTrainer and GRPOTrainer: two ranks with too little memory for their batches
demo-hf: $(READY)
	$(BIN)/torchrun --nproc_per_node 2 examples/transformers_trainer.py --memory_limit 5MiB
	if $(BIN)/python -c 'import trl' 2>/dev/null; then \
		$(BIN)/torchrun --nproc_per_node 2 examples/sft_trl.py --memory_limit 24MiB; \
		$(BIN)/torchrun --nproc_per_node 2 examples/grpo_trl.py --memory_limit 22MiB; fi

# required for every change, in 6 to 11 minutes on two cores: lint, types, unit tests and the tests marked smoke, which cover
# each feature in README and each kind of fault once; then the same for gpu-rehearsal (`make -C rehearsal test`)
test: lint
	$(BIN)/python -m $(PYTEST) -m smoke
	$(REHEARSAL) test

# every test that needs no GPU, in under 20 minutes on two idle cores
test-all: lint
	$(BIN)/python -m $(PYTEST)
	$(REHEARSAL) test-all

# coverage of lines and branches, including spawned and forked ranks; takes about twice as long as `make test-all`.
# A process that a test kills may leave a corrupt data file, which is skipped with a warning
coverage: $(READY)
	rm -rf .coverage
	mkdir .coverage
	$(BIN)/python -m coverage run -m $(PYTEST)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# one GPU, under 8 minutes
test-gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu

# compares TRL's trainers and PEFT's LoRA with and without this package; the environment has no torchtune, because PEFT
# needs a newer torchao
test-hf: $(VENV)/hf/ready
	$(VENV)/hf/bin/python -m $(PYTEST) --dist load tests/hf/test_trainers.py tests/hf/test_generation.py

$(VENV)/hf/ready: pyproject.toml constraints.txt | $(READY)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --editable '.[hf]' trl peft bitsandbytes torchao pytest pytest-timeout pytest-xdist $(SHOW)
	$(@D)/bin/python -m pip check
	touch $@

# SkyRL's workers with and without recovery, in an environment with the versions that SkyRL requires, and without what a CPU
# does not need, such as vLLM; ten minutes. SkyRL's metadata asks for Python 3.12, but its code also runs on 3.11
test-skyrl: $(VENV)/skyrl/ready
	$(VENV)/skyrl/bin/python -m pytest tests/skyrl

$(VENV)/skyrl/ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --progress-bar off torch==2.13.0 'transformers>=5.6.1,<=5.16.1' peft==0.18.1 ray==2.57.0 \
		hydra-core==1.3.4 $(SKYRL) --editable ./rehearsal --editable . pytest pytest-timeout pytest-xdist $(SHOW)
	$(@D)/bin/python -m pip install --quiet --no-deps --ignore-requires-python skyrl==0.4.0 skyrl-gym==0.4.0
	touch $@

# torchtitan's Trainer with and without recovery, in an environment with the versions that torchtitan requires, without
# torchao, whose current version does not work with torch 2.15 on GPUs; under eight minutes
test-titan: $(VENV)/titan/ready
	$(VENV)/titan/bin/python -m $(PYTEST) --dist load tests/titan

$(VENV)/titan/ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --progress-bar off torch==2.15.0 torchtitan==0.3.0 --editable ./rehearsal --editable . \
		pytest pytest-timeout pytest-xdist hypothesis $(SHOW)
	touch $@

# validates the examples for schedulers with SkyPilot, Kubeflow and TorchX, in an environment without torch
test-launchers: $(VENV)/launchers/ready
	$(VENV)/launchers/bin/python -m pytest --noconftest tests/launchers

$(VENV)/launchers/ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --progress-bar off skypilot==0.14.1 kubeflow==0.5.0 torchx==0.7.0 pytest pytest-timeout $(SHOW)
	touch $@

# trains with other frameworks, each in an environment with the versions that it requires (4 GB in all); slow
test-frameworks: $(FRAMEWORKS:%=$(VENV)/framework-%/ready)
	for framework in $(FRAMEWORKS); do $(VENV)/framework-$$framework/bin/python -m pytest tests/hf/test_frameworks.py; done

$(VENV)/framework-%/ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --progress-bar off '$*$(if $(filter ray,$*),[train])==$($*)' --editable '.[hf]' pytest pytest-timeout $(SHOW)
	touch $@

# recovery and search on simulated GPUs, and rehearsals of recipes; needs a CUDA build of torch and a C compiler, no GPU
test-null: $(READY)
	$(BIN)/python -m pytest tests/null tests/rehearsals

# recovery over torch's own NCCL process groups, without a GPU: every operation under FSDP2 and hybrid sharding, 4 operations of
# each other case of `make faults` that a null device can run. An hour on two idle cores
test-nccl: $(READY)
	$(BIN)/python -W ignore -m tests.null.nccl
	$(BIN)/python -m tools.measured

# compares rehearsals with published figures, in about five minutes; `make test-all` checks only one of them
published: $(READY)
	TORCHTUNE_ADAPTIVE_PUBLISHED=1 $(BIN)/python -m pytest tests/rehearsals/test_published.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# injects out-of-memory errors into 12 operations of a step in each case, and into every operation of a step of
# Trainer; about 50 minutes on two idle cores
faults: $(READY)
	$(BIN)/python -m tests.distributed.faults
	$(BIN)/python -m tests.distributed.faults --case "Trainer, FSDP2" --all

# checks of torch's private names, engine tests, distributed tests and smoke tests of the recipes with every supported torch;
# writes the table of CONTRIBUTING.md
versions: $(READY) $(VERSIONS:%=$(VENV)/torch-%/ready)
	$(BIN)/python -W ignore -m tools.versions $(VERSIONS)

$(VENV)/torch-%/ready: pyproject.toml constraints.txt | $(READY)
	$(PYTHON) -m venv $(@D)
	grep -v '^torch==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(@D)/constraints.txt torch===$* --editable ./rehearsal --editable '.[dev]'
	touch $@

# hundreds of steps of four recipes, by rows and by tokens, while the free memory changes; 5,000 steps that check for memory
# leaks; and the tests marked nightly
soak: $(READY)
	$(BIN)/python -W ignore -m tests.recipes.long.soak 2>$(VENV)/soak.log || { tail -n 50 $(VENV)/soak.log; exit 1; }
	$(BIN)/python -m $(PYTEST) -m nightly

# hundreds of `kill -9` and signals, full and read-only disks; under 40 minutes on two cores
crash: $(READY)
	$(BIN)/python -W ignore -m tests.recipes.crash 2>$(VENV)/crash.log || { tail -n 50 $(VENV)/crash.log; exit 1; }

# benchmarks against the stock recipes and other libraries, in about 22 minutes; needs an otherwise idle machine
bench: $(PEERS)
	$(BIN)/python -W ignore -m benchmarks 2>$(VENV)/bench.log || { tail -n 50 $(VENV)/bench.log; exit 1; }
	$(BIN)/python -m tools.measured

# the measurements that need a GPU, in about 15 minutes; ONLY="recovery rehearsals" runs only these parts; INTO= is the folder
# of results, PATIENCE= a factor on the time limits
gpu-day: $(READY)
	$(BIN)/python -W ignore -m benchmarks.gpu_day $(if $(ONLY),--only $(ONLY)) $(if $(INTO),--into $(INTO)) $(if $(PATIENCE),--patience $(PATIENCE))

# builds the website in build/site from the pages and the docstrings, and checks its links
docs: $(SITE)
	rm -rf build/pages
	mkdir -p build/pages
	git ls-files -z '*.md' docs examples benchmarks/results rehearsal/benchmarks rehearsal/examples \
		rehearsal/action.yml rehearsal/gpu_rehearsal/adapters.py torchtune_adaptive/rehearsing.py ':!rehearsal/benchmarks/*.md' | xargs -0 cp --parents -t build/pages
	$(BIN)/mkdocs build --strict

# builds the sdists and, from them, the wheels of both packages; tries each in an environment without the other, then the
# wheel with [recipes]
dist: $(READY)
	rm -rf dist build/installed build/rehearsal
	for project in . rehearsal; do $(BIN)/python -m build --outdir dist $$project; done
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/installed
	for built in dist/torchtune_adaptive*; do \
		build/installed/bin/python $(PIP_INSTALL) --force-reinstall --no-deps "$$built"; \
		build/installed/bin/python $(PIP_INSTALL) "$$built" $(SHOW); \
		build/installed/bin/python -m pip check; \
		(cd build/installed && bin/torchrun --nproc_per_node 2 $(CURDIR)/examples/plain_fsdp2.py); \
		(cd build/installed && ! bin/tune-adaptive ls 2>error && grep 'install the \[recipes\] extra' error); \
	done
	build/installed/bin/python -m pip uninstall --yes torchtune-adaptive
	for built in dist/gpu_rehearsal*; do \
		build/installed/bin/python $(PIP_INSTALL) --force-reinstall --no-deps "$$built"; \
		build/installed/bin/python -m pip check; \
		(cd build/installed && bin/rehearse --ranks 8 --memory 80GB -- $(CURDIR)/rehearsal/examples/llama_8b_fsdp2.py); \
	done
	wheel=$$(echo dist/torchtune_adaptive*.whl) && build/installed/bin/python $(PIP_INSTALL) "$$wheel[recipes]" $(SHOW)
	build/installed/bin/python -m pip check
	cd build/installed && bin/tune-adaptive ls demo
	cd build/installed && bin/tune run --nproc_per_node 2 adaptive_full_finetune_distributed --config adaptive/demo/full

# the size of each product and of its tests and pages, with the limits
limits: $(READY)
	$(BIN)/python tools/limits.py

clean:
	rm -rf $(VENV) build dist .coverage *.egg-info runs

$(RUNS): pyproject.toml rehearsal/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info < (3, 14); \
		sys.exit(None if ok else "Python %d.%d found, 3.11 to 3.13 needed: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@echo 'setting up $(VENV): torch and its CUDA libraries take 6 GB and a few minutes'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP_INSTALL) --editable ./rehearsal --editable '.[recipes,plot]' $(SHOW)
	@touch $(RUNS)

$(READY): $(RUNS)
	@$(BIN)/python $(PIP_INSTALL) --editable ./rehearsal --editable '.[dev]' $(SHOW)
	@touch $(READY)

$(PEERS): $(READY)
	$(BIN)/python $(PIP_INSTALL) --editable '.[dev,bench]' $(SHOW)
	touch $(PEERS)

$(SITE): $(READY)
	$(BIN)/python $(PIP_INSTALL) --editable '.[dev,docs]' $(SHOW)
	touch $(SITE)
