# Everything runs in .venv, which the first target that needs it creates.
SHELL := /bin/sh
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP_INSTALL := python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
PIP := $(BIN)/$(PIP_INSTALL)
JOB ?= jobs/ddp.yaml
NODES ?= 1
GPUS ?= 2
OUT ?= build
HOSTS ?= 2
# One more than processors: the tests also wait, for processes to end and clocks to pass.
WORKERS ?= $(shell echo $$(($$(nproc 2>/dev/null || echo 1) + 1)))

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##  ---- the environment

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "clusterkit needs Python 3.11 or newer: apt-get install python3 python3-venv" >&2; exit 3; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "$(PYTHON) cannot make environments: apt-get install python3-venv" >&2; exit 3; }

# torch first: packages that require torch then find it installed, and pip downloads no CUDA build.
.venv/.train: pyproject.toml constraints.txt | .venv/bin/python
	@echo "making .venv (torch, deepspeed, transformers): a few minutes the first time" >&2
	@$(PIP) torch
	@$(PIP) --editable '.[train,ssh,kubernetes]'
	@touch $@

.venv/.dev: .venv/.train
	@echo "adding what the tests need to .venv" >&2
	@$(PIP) --editable '.[train,dev]'
	@touch $@

.PHONY: venv
venv: .venv/.train ## Make .venv with what runs jobs: torch, deepspeed, transformers

.PHONY: lock
lock: .venv/.dev ## Upgrade all packages and write constraints.txt
	@$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[train,dev]'
	@{ sed '/^[^#]/,$$d' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//; s/+cu[0-9]*$$//' | grep -v '^nvidia\|^triton\|^cuda'; } >constraints.new
	@mv constraints.new constraints.txt

##  ---- use

.PHONY: run-local
run-local: .venv/.train ## Train on this machine: GPUS=2 NODES=1 JOB=jobs/ddp.yaml
	@$(BIN)/clusterkit submit $(JOB) --nodes $(NODES) --gpus $(GPUS)

.PHONY: parity
parity: .venv/.train ## Compare the losses of all strategies, also resumed; writes docs/parity.md
	@$(BIN)/python -m tests.live.parity

.PHONY: lab
lab: .venv/.train ## Start SSH hosts in network namespaces of this machine, in .lab; needs root: HOSTS=2
	@$(BIN)/python -m tests.lab up $(HOSTS)

.PHONY: lab-down
lab-down: ## Stop and remove the SSH hosts of `make lab`
	@$(PYTHON) -m tests.lab down

.PHONY: estimate-check
estimate-check: .venv/.train ## Compare predicted with measured memory; writes the table of docs/estimate.md
	@$(BIN)/python -m tests.live.estimate --write

.PHONY: bench
bench: .venv/.train ## Measure start-up, restarts and scale, as ratios against torchrun, deepspeed and others
	@$(BIN)/python -m tests.bench
	@$(BIN)/python -m tests.bench.start
	@$(BIN)/python -m tests.bench.gpt
	@$(BIN)/python -m tests.bench.scale
	@$(BIN)/python -m tests.bench.ssh || [ $$? = 3 ]
	@$(BIN)/python -m tests.bench.compose || [ $$? = 3 ]
	@$(BIN)/python -m tests.bench.kubernetes || [ $$? = 3 ]
	@$(BIN)/python -m tests.bench.slurm || [ $$? = 3 ]

.PHONY: bench-gpu
bench-gpu: .venv/.train ## Measure tokens/s, MFU and peak memory of jobs/train/gpt on one GPU; under 10 minutes
	@$(BIN)/python -m tests.bench.gpu || [ $$? = 3 ]

MINUTES ?= 10
.PHONY: bench-goodput
bench-goodput: .venv/.train ## Measure goodput with one rank killed per minute, against torchrun --max-restarts: MINUTES=10
	@$(BIN)/python -m tests.bench.goodput --minutes $(MINUTES)

##  ---- containers

# BASE is the base image. Builds clusterkit:gpu on a machine with GPUs, else clusterkit:cpu.
.PHONY: image
image: ## Build the training image: BASE=IMAGE
	@$(PYTHON) docker/build.py $(if $(BASE),--base $(BASE))

.PHONY: image-test
image-test: ## Check the image from inside, as its own user and as an arbitrary uid: IMAGE=NAME
	@$(PYTHON) docker/check.py $(IMAGE)

.PHONY: wheelhouse
wheelhouse: ## Download the wheels for the image, which is then built without a package index
	@ls wheelhouse/*.whl >/dev/null 2>&1 || rm -f wheelhouse/.made
	@$(MAKE) --no-print-directory wheelhouse/.made

wheelhouse/.made: pyproject.toml constraints.txt docker/requirements.py | .venv/bin/python
	@mkdir -p .make && rm -f wheelhouse/*.whl
	@$(BIN)/python docker/requirements.py >.make/requirements.txt
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --wheel-dir wheelhouse --constraint constraints.txt --requirement .make/requirements.txt
	@! ls wheelhouse/cuda_toolkit-*.whl >/dev/null 2>&1 || $(BIN)/python -m pip wheel --quiet --disable-pip-version-check \
		--wheel-dir wheelhouse --find-links wheelhouse --constraint constraints.txt torch 'cuda-toolkit[nvcc,cccl,profiler]'
	@touch $@

.PHONY: docker-lab
docker-lab: ## Start SSH hosts in containers, in .docker-lab: HOSTS=2
	@$(PYTHON) docker/lab.py up --hosts $(HOSTS)

.PHONY: docker-lab-down
docker-lab-down: ## Stop and remove the hosts of `make docker-lab`
	@$(PYTHON) docker/lab.py down

.PHONY: engine
engine: .venv/.dev ## Start a docker engine with compose and a base image, on Debian without systemd; needs root
	@$(BIN)/python -m tests.live.compose.engine up

.PHONY: engine-down
engine-down: .venv/.dev ## Stop the engine and remove its images, containers and volumes
	@$(BIN)/python -m tests.live.compose.engine down

##  ---- Kubernetes

KUBE ?= ../shared/kube/cluster

# Loads the docker engine's image clusterkit:cpu into the cluster.
.PHONY: kube-up
kube-up: ## Start a Kubernetes on this machine with all operators and clusterkit:cpu; needs root: KUBE=SCRIPT
	@test -x $(KUBE) || { echo "$(KUBE) not found; docs/kubernetes.md shows how to use kind or minikube instead" >&2; exit 3; }
	@docker image inspect clusterkit:cpu >/dev/null || { echo "image clusterkit:cpu not found; run: make image (with GPUs: python3 docker/build.py --tag clusterkit:cpu)" >&2; exit 3; }
	@$(KUBE) up
	@mkdir -p .make && docker save $$(docker image inspect clusterkit:cpu --format '{{join .RepoTags " "}}') --output .make/image.tar && $(KUBE) load .make/image.tar; code=$$?; rm -f .make/image.tar; exit $$code

.PHONY: kube-down
kube-down: ## Stop and remove the cluster of `make kube-up`
	@$(KUBE) down

##  ---- checks

.PHONY: test
test: lint types unit live ## Run all checks: lint, types, unit, live

.PHONY: lint
lint: .venv/.dev ## Run ruff, and check that generated docs are up to date
	@$(BIN)/ruff check --quiet .
	@$(BIN)/python -m tests.generated_docs --check
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check .; exit 1; }

.PHONY: types
types: .venv/.dev ## Run mypy, strict
	@$(BIN)/mypy

# Report the slowest tests at the end.
SLOW := --durations 40 --durations-min 5

.PHONY: unit
unit: .venv/.dev ## Run the unit, contract, golden and simulation tests, a failed one twice as in live: WORKERS=2
	@$(BIN)/python -m tests.rerun -m "not thorough" $(SLOW) --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal \
		tests/unit tests/contract tests/golden tests/simulation

# What differs from Python to Python and needs no torch: the agent and its threads, tracebacks, files
# and processes. `make thorough` runs all the rest there, with torch.
ON_EACH ?= $(addprefix tests/unit/test_,$(addsuffix .py, \
	agent catalogue diagnose estimate failure hangs pythons scaffold stragglers streams tracebacks usage watch_port watching worker)) tests/unit/estimate
TORCH ?=

.PHONY: unit-newest
unit-newest: ## Run the tests of the agent on the newest Python that is there, in .venv-VERSION; tests/pythons.py finds it
	@found=$$($(PYTHON) -m tests.pythons newest) && \
	if [ -n "$$found" ]; then set -- $$found && $(MAKE) --no-print-directory unit-on VERSION=$$1 ON=$$2; \
	else echo "unit-newest: skipped: no Python up to 3.14 is here that is newer than that of .venv" >&2; fi

.PHONY: unit-others
unit-others: ## Run them on all other Pythons from 3.11 to 3.14 that are there, with torch, and the tests of hangs: gigabytes
	@mkdir -p .make && $(PYTHON) -m tests.pythons others >.make/pythons && \
	while read -r version path; do $(MAKE) --no-print-directory unit-on VERSION=$$version ON=$$path TORCH=torch || exit; done <.make/pythons

# Without torch the tests that need it are skipped by name.
.venv-$(VERSION)/.made: pyproject.toml constraints.txt
	@$(ON) -m venv .venv-$(VERSION)
	@.venv-$(VERSION)/bin/$(PIP_INSTALL) --editable '.[test]'
	@touch $@

.venv-$(VERSION)/.madetorch: .venv-$(VERSION)/.made
	@.venv-$(VERSION)/bin/$(PIP_INSTALL) torch
	@.venv-$(VERSION)/bin/$(PIP_INSTALL) --editable '.[dev,train]'
	@touch $@

.PHONY: unit-on
unit-on: .venv-$(VERSION)/.made$(TORCH)
	@.venv-$(VERSION)/bin/python -m tests.rerun -m "not thorough" $(SLOW) --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal \
		$(if $(TORCH),tests/unit tests/contract tests/golden tests/simulation,$(ON_EACH))
	@$(if $(TORCH),.venv-$(VERSION)/bin/python -m pytest tests/live/test_hangs.py)

SCHEDULES ?= 100000
.PHONY: simulation
simulation: .venv/.dev ## Simulate runs under random faults: SCHEDULES=100000
	@$(BIN)/python -m tests.simulation $(SCHEDULES)
	@$(BIN)/python -m tests.simulation submitter $(SCHEDULES)

FAULTS ?= 50
SEED ?= 1
ON ?= local
.PHONY: chaos
chaos: .venv/.dev ## Inject random faults into real runs; needs root: FAULTS=50 SEED=1 ON=local,ssh,compose,kubernetes,slurm
	@$(BIN)/python -m tests.chaos --faults $(FAULTS) --seed $(SEED) --on $(ON) $(if $(ONLY),--only $(ONLY))

.PHONY: live
live: .venv/.dev ## Run the tests of real runs; a failed test is rerun once, and printed as FLAKY if it then passes
	@$(BIN)/python -m tests.rerun -m "not thorough" $(SLOW) --numprocesses 4 --dist loadscope tests/live

.PHONY: live-here
live-here: .venv/.dev ## Run the live tests of this machine alone: local runs, all programs, parity
	@$(BIN)/python -m tests.rerun -m "not thorough" tests/live/test_*.py

.PHONY: live-nodes
live-nodes: .venv/.dev ## Run the live tests on SSH hosts, in containers, on Kubernetes and Slurm; skips what is not installed
	@$(BIN)/python -m tests.rerun -m "not thorough" tests/live/ssh tests/live/compose tests/live/kubernetes tests/live/slurm

.PHONY: thorough
thorough: .venv/.dev ## Run the slow tests that `make test` leaves out, of gpu-check too, and unit-others; needs root
	@$(BIN)/python -m tests.live.gpu.environment
	@$(BIN)/pytest -m thorough tests/unit tests/live
	@$(MAKE) --no-print-directory unit-others

.PHONY: gpu-check
gpu-check: .venv/.dev ## Check losses and the fast start with torch's build for CUDA, without a GPU: .venv-gpu has 5.3 GB
	@$(BIN)/python -m tests.live.gpu.environment
	@$(BIN)/pytest tests/live/gpu

.PHONY: lab-test
lab-test: .venv/.dev ## Run the tests of `make lab` itself, after a change in tests/lab; needs root
	@$(BIN)/pytest tests/live/ssh/test_lab.py && $(BIN)/python -m tests.tested lab

.PHONY: ansible-test
ansible-test: .venv/.dev ## Run all tests of the Ansible roles, after a change in ansible/; needs root
	@$(BIN)/pytest tests/live/ssh/test_ansible.py tests/live/slurm/test_role.py && $(BIN)/python -m tests.tested ansible

.PHONY: kube-test
kube-test: .venv/.dev ## Run all tests on Kubernetes, with the cluster of ../shared/kube: 25 minutes; needs root
	@$(BIN)/pytest tests/live/kubernetes

.PHONY: format
format: .venv/.dev ## Format the code with ruff
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

.PHONY: docs
docs: .venv/.dev ## Regenerate the generated parts of docs/
	@$(BIN)/python -m tests.generated_docs

.PHONY: wheel
wheel: .venv/.dev ## Build the wheel into build/ and install it into a new environment
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(OUT) .
	@rm -rf $(OUT)/venv && $(PYTHON) -m venv $(OUT)/venv
	@$(OUT)/venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(OUT)/clusterkit-*.whl
	@$(OUT)/venv/bin/clusterkit --version

.PHONY: clean
clean: ## Remove the environments and build output
	@rm -rf .venv .venv-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache
