# `make demo` and `make test` are the only set-up there is: both make .venv first, and only once.
# From a change to a release: test, test-all, then the nightly sweeps faults, crash, soak and versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PEERS := $(VENV)/ready-to-bench
SITE := $(VENV)/ready-for-docs
# test files that run side by side
WORKERS ?= 2
PYTEST := pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
SHELL := bash
.SHELLFLAGS := -o pipefail -ec
# pip under the pinned versions; prints what it downloads, since the environments take several gigabytes
PIP_INSTALL := -m pip install --disable-pip-version-check --progress-bar off --constraint constraints.txt
SHOW := | sed -un 's/^ *\(Downloading\|Using cached\) \([^ ]*\).*(\(.*[MG]B\))$$/  \2 (\3)/p; s/^Installing collected.*/  unpacking 6 GB: minutes without output/p'
# one thread a process: several ranks share the cores
export OMP_NUM_THREADS := 1

# supported besides the torch of constraints.txt; the CUDA builds take 6 GB each
VERSIONS ?= 2.13.0 2.14.1

.PHONY: demo demo-rehearse demo-dpo demo-ppo demo-grpo demo-hf test test-all coverage test-gpu test-foreign test-hf test-null published lint faults versions soak crash bench gpu-day docs dist clean

demo: $(READY)
	$(BIN)/tune run --nproc_per_node 2 adaptive_full_finetune_distributed --config adaptive/demo/full
	$(BIN)/tune run --nproc_per_node 2 adaptive_lora_finetune_distributed --config adaptive/demo/lora
	@echo 'What happened: runs/demo/full/adaptive_report.png. Next: . $(BIN)/activate, then README, section 1'

# preference training: full, with a reference model, then adapters, whose reference is the policy without them
demo-dpo: $(READY)
	$(BIN)/tune run --nproc_per_node 2 adaptive_full_dpo_distributed --config adaptive/demo/dpo
	$(BIN)/tune run --nproc_per_node 2 adaptive_lora_dpo_distributed --config adaptive/demo/lora_dpo

# reinforcement learning (PPO): the mean reward rises from 0.05 to above 0.3
demo-ppo: $(READY)
	$(BIN)/tune run --nproc_per_node 2 adaptive_ppo_full_finetune_distributed --config adaptive/demo/ppo

# transformers' Trainer and, where it is installed, TRL's SFTTrainer: two ranks with too little memory for their batches
demo-hf: $(READY)
	$(BIN)/torchrun --nproc_per_node 2 examples/transformers_trainer.py --memory_limit 5MiB
	if $(BIN)/python -c 'import trl' 2>/dev/null; then \
		$(BIN)/torchrun --nproc_per_node 2 examples/sft_trl.py --memory_limit 24MiB; fi

# GRPO: a tiny policy learns to sort two digits, in two and a half minutes
demo-grpo: $(READY)
	$(BIN)/tune run --nproc_per_node 2 adaptive_grpo_full_finetune_distributed --config adaptive/demo/grpo

# Llama 3.1 8B as one of eight GPUs of 80 GB that are not there: 1 row fits, 2 do not
demo-rehearse: $(READY)
	$(BIN)/tune-adaptive rehearse --ranks 8 --memory 80GB -- examples/llama_8b_fsdp2.py --rows 1
	! $(BIN)/tune-adaptive rehearse --ranks 8 --memory 80GB -- examples/llama_8b_fsdp2.py --rows 2 2>/dev/null

# required for every change, in 6 to 11 minutes on two cores: lint, types, unit tests, and the tests marked smoke: one run
# of each feature in README and one fault of each kind
test: lint
	$(BIN)/python -m $(PYTEST) -m smoke

# every test that needs no GPU, in under 20 minutes on two quiet cores
test-all: lint
	$(BIN)/python -m $(PYTEST)

# lines and branches, those of spawned and forked ranks too; takes about twice as long as `make test-all`. What processes had
# noted that a test has killed may be torn: it is left out, with a warning
coverage: $(READY)
	rm -rf .coverage
	mkdir .coverage
	$(BIN)/python -m coverage run -m $(PYTEST)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# one GPU, under 8 minutes
test-gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu

# TRL's trainers and PEFT's LoRA compared with stock, in an environment without torchtune: PEFT needs a newer torchao
test-hf: $(VENV)/hf/ready
	$(VENV)/hf/bin/python -m $(PYTEST) --dist load tests/hf/test_trainers.py

$(VENV)/hf/ready: pyproject.toml constraints.txt | $(READY)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --editable '.[hf]' trl peft bitsandbytes torchao pytest pytest-timeout pytest-xdist $(SHOW)
	$(@D)/bin/python -m pip check
	touch $@

# torch's own CUDA code over a null device; needs a CUDA build of torch and a C compiler, no GPU
test-null: $(READY)
	$(BIN)/python -m pytest tests/null tests/rehearse tests/forecast

# rehearsals of scripts that use other libraries, in an environment of 7 GB without torchtune; writes the table of
# docs/rehearsing.md. Twelve minutes on two idle cores, five of them for installation
test-foreign: $(VENV)/foreign/ready
	$(VENV)/foreign/bin/python -m tests.foreign

$(VENV)/foreign/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --editable '.[hf]' trl peft bitsandbytes torchao deepspeed liger-kernel lightning \
		diffusers timm torchvision torch_geometric sentence-transformers $(SHOW)
	touch $@

# forecasts beside published figures, in about five minutes; `make test-all` asks for one of them
published: $(READY)
	TORCHTUNE_ADAPTIVE_PUBLISHED=1 $(BIN)/python -m pytest tests/forecast/test_published.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# 12 operations of a step in each of 230 cases run out of memory: about 45 minutes on two idle cores
faults: $(READY)
	$(BIN)/python -m tests.distributed.faults
	$(BIN)/torchrun --nproc_per_node 2 -m tests.hf.faults

# engine tests, distributed tests and smoke tests of the recipes with every supported torch; writes the table of docs/versions.md
versions: $(READY) $(VERSIONS:%=$(VENV)/torch-%/ready)
	$(BIN)/python -W ignore -m tools.versions $(VERSIONS)

$(VENV)/torch-%/ready: pyproject.toml constraints.txt | $(READY)
	$(PYTHON) -m venv $(@D)
	grep -v '^torch==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(@D)/constraints.txt torch==$* --editable '.[dev]'
	touch $@

# hundreds of steps while memory comes and goes: four recipes, by rows and by tokens; 5,000 that must not keep any; and tests
# that are marked nightly
soak: $(READY)
	$(BIN)/python -W ignore -m tests.recipes.long.soak 2>$(VENV)/soak.log || { tail -n 50 $(VENV)/soak.log; exit 1; }
	$(BIN)/python -W ignore -m tests.recipes.long.endurance 2>$(VENV)/soak.log || { tail -n 50 $(VENV)/soak.log; exit 1; }
	$(BIN)/python -m $(PYTEST) -m nightly

# hundreds of `kill -9` and signals, two runs in one folder, a scheduler; under 40 minutes on two cores
crash: $(READY)
	$(BIN)/python -W ignore -m tests.recipes.crash 2>$(VENV)/crash.log || { tail -n 50 $(VENV)/crash.log; exit 1; }

# beside stock and peers, in some 22 minutes; wants a machine that does nothing else
bench: $(PEERS)
	$(BIN)/python -W ignore -m benchmarks 2>$(VENV)/bench.log || { tail -n 50 $(VENV)/bench.log; exit 1; }
	$(BIN)/python -m tools.measured

# everything that only a GPU can tell, in about 12 minutes; ONLY="recovery rehearsals" runs these parts
gpu-day: $(READY)
	$(BIN)/python -W ignore -m benchmarks.gpu_day $(if $(ONLY),--only $(ONLY))

# the pages as a site in build/site, links checked, with the library's docstrings
docs: $(SITE)
	rm -rf build/pages
	mkdir -p build/pages/benchmarks
	cp -r *.md docs examples build/pages
	cp -r benchmarks/results build/pages/benchmarks
	$(BIN)/mkdocs build --strict

# builds the sdist and, from it, the wheel; tries both in an environment without torchtune, then the wheel with [recipes]
dist: $(READY)
	rm -rf dist build/installed
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/installed
	for built in dist/*.tar.gz dist/*.whl; do \
		build/installed/bin/python $(PIP_INSTALL) --force-reinstall --no-deps "$$built"; \
		build/installed/bin/python $(PIP_INSTALL) "$$built" $(SHOW); \
		build/installed/bin/python -m pip check; \
		(cd build/installed && bin/torchrun --nproc_per_node 2 $(CURDIR)/examples/plain_fsdp2.py); \
		(cd build/installed && bin/tune-adaptive rehearse --ranks 8 --memory 80GB -- $(CURDIR)/examples/llama_8b_fsdp2.py); \
		(cd build/installed && ! bin/tune-adaptive ls 2>error && grep 'install the \[recipes\] extra' error); \
	done
	wheel=$$(echo dist/*.whl) && build/installed/bin/python $(PIP_INSTALL) "$$wheel[recipes]" $(SHOW)
	build/installed/bin/python -m pip check
	cd build/installed && bin/tune-adaptive ls demo
	cd build/installed && bin/tune run --nproc_per_node 2 adaptive_full_finetune_distributed --config adaptive/demo/full

clean:
	rm -rf $(VENV) build dist .coverage *.egg-info runs

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; ok = (3, 11) <= sys.version_info < (3, 14); \
		sys.exit(None if ok else "Python %d.%d found, 3.11 to 3.13 needed: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@echo 'setting up $(VENV): torch and its CUDA libraries take 6 GB and a few minutes'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP_INSTALL) --editable '.[dev]' $(SHOW)
	@touch $(READY)

$(PEERS): $(READY)
	$(BIN)/python $(PIP_INSTALL) --editable '.[dev,bench]' $(SHOW)
	touch $(PEERS)

$(SITE): $(READY)
	$(BIN)/python $(PIP_INSTALL) --editable '.[dev,docs]' $(SHOW)
	touch $(SITE)
