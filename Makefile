# Everything runs in .venv; the first target that needs it makes it.
SHELL := /bin/sh
.DEFAULT_GOAL := help

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
JOB ?= jobs/ddp.yaml
NODES ?= 1
GPUS ?= 2
OUT ?= build
HOSTS ?= 2
WORKERS ?= $(shell nproc 2>/dev/null || echo 1)

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##  ---- the environment

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "clusterkit needs Python 3.11 or newer: apt-get install python3 python3-venv" >&2; exit 3; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "$(PYTHON) cannot make environments: apt-get install python3-venv" >&2; exit 3; }

# torch first: whatever else asks for torch then finds this one.
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
venv: .venv/.train ## The environment that runs jobs

.PHONY: lock
lock: .venv/.dev ## Write constraints.txt anew from what pip finds now
	@$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[train,dev]'
	@{ sed '/^[^#]/,$$d' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//; s/+cu[0-9]*$$//' | grep -v '^nvidia\|^triton\|^cuda'; } >constraints.new
	@mv constraints.new constraints.txt

##  ---- use

.PHONY: run-local
run-local: .venv/.train ## Train on this machine: GPUS=2 NODES=1 JOB=jobs/ddp.yaml
	@$(BIN)/clusterkit submit $(JOB) --nodes $(NODES) --gpus $(GPUS)

.PHONY: parity
parity: .venv/.train ## The same losses from every strategy, also resumed; writes docs/parity.md
	@$(BIN)/python -m tests.live.parity

.PHONY: lab
lab: .venv/.train ## Real SSH hosts on this machine, in .lab; root: HOSTS=2
	@$(BIN)/python -m tests.lab up $(HOSTS)

.PHONY: lab-down
lab-down: ## Remove them
	@$(PYTHON) -m tests.lab down

.PHONY: estimate-check
estimate-check: .venv/.train ## Predicted memory against measured; writes the table of docs/estimate.md
	@$(BIN)/python -m tests.live.estimate --write

.PHONY: bench
bench: .venv/.train ## Ratios against torchrun and deepspeed, start-up, runs and plans of many nodes
	@$(BIN)/python -m tests.bench
	@$(BIN)/python -m tests.bench.start
	@$(BIN)/python -m tests.bench.gpt
	@$(BIN)/python -m tests.bench.scale
	@$(BIN)/python -m tests.bench.ssh || [ $$? = 3 ]
	@$(BIN)/python -m tests.bench.compose || [ $$? = 3 ]
	@$(BIN)/python -m tests.bench.kubernetes || [ $$? = 3 ]
	@$(BIN)/python -m tests.bench.slurm || [ $$? = 3 ]

.PHONY: bench-gpu
bench-gpu: .venv/.train ## Tokens/s, MFU and peak memory of jobs/train/gpt on one GPU; under 10 minutes
	@$(BIN)/python -m tests.bench.gpu || [ $$? = 3 ]

MINUTES ?= 10
.PHONY: bench-goodput
bench-goodput: .venv/.train ## Goodput with a rank killed a minute, against torchrun --max-restarts: MINUTES=10
	@$(BIN)/python -m tests.bench.goodput --minutes $(MINUTES)

##  ---- containers

# BASE: the base image. With GPUs clusterkit:gpu is made, without clusterkit:cpu.
.PHONY: image
image: ## Build the training image: BASE=IMAGE
	@$(PYTHON) docker/build.py $(if $(BASE),--base $(BASE))

.PHONY: image-test
image-test: ## Check the image from inside, as its own user and as an unknown one: IMAGE=NAME
	@$(PYTHON) docker/check.py $(IMAGE)

.PHONY: wheelhouse
wheelhouse: ## Wheels of all that the image needs, so that building it needs no index
	@ls wheelhouse/*.whl >/dev/null 2>&1 || rm -f wheelhouse/.made
	@$(MAKE) --no-print-directory wheelhouse/.made

wheelhouse/.made: pyproject.toml constraints.txt docker/requirements.py | .venv/bin/python
	@mkdir -p .make && rm -f wheelhouse/*.whl
	@$(BIN)/python docker/requirements.py >.make/requirements.txt
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --wheel-dir wheelhouse --constraint constraints.txt --requirement .make/requirements.txt
	@touch $@

.PHONY: docker-lab
docker-lab: ## SSH hosts out of containers, in .docker-lab: HOSTS=2
	@$(PYTHON) docker/lab.py up --hosts $(HOSTS)

.PHONY: docker-lab-down
docker-lab-down: ## Remove them
	@$(PYTHON) docker/lab.py down

.PHONY: engine
engine: .venv/.dev ## A docker engine with compose and a base image, on Debian without systemd; root
	@$(BIN)/python -m tests.live.compose.engine up

.PHONY: engine-down
engine-down: .venv/.dev ## End it and remove all it holds
	@$(BIN)/python -m tests.live.compose.engine down

##  ---- Kubernetes

KUBE ?= ../shared/kube/cluster

# Loads the image that the docker engine has as clusterkit:cpu.
.PHONY: kube-up
kube-up: ## A Kubernetes on this machine with all operators and clusterkit:cpu; root: KUBE=SCRIPT
	@test -x $(KUBE) || { echo "$(KUBE) is not there; docs/kubernetes.md says how with kind or minikube" >&2; exit 3; }
	@docker image inspect clusterkit:cpu >/dev/null || { echo "first: make image, or with GPUs: python3 docker/build.py --tag clusterkit:cpu" >&2; exit 3; }
	@$(KUBE) up
	@mkdir -p .make && docker save $$(docker image inspect clusterkit:cpu --format '{{join .RepoTags " "}}') --output .make/image.tar && $(KUBE) load .make/image.tar; code=$$?; rm -f .make/image.tar; exit $$code

.PHONY: kube-down
kube-down: ## Remove it
	@$(KUBE) down

##  ---- checks

.PHONY: test
test: lint types unit live ## All of it: lint, types, unit, contract, golden, live

.PHONY: lint
lint: .venv/.dev ## ruff, and that the generated docs are up to date
	@$(BIN)/ruff check --quiet .
	@$(BIN)/python -m tests.generated_docs --check
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check .; exit 1; }

.PHONY: types
types: .venv/.dev ## mypy, strict
	@$(BIN)/mypy

# What took longest is told at the end.
SLOW := --durations 40 --durations-min 5

.PHONY: unit
unit: .venv/.dev ## Tests that need no cluster: WORKERS=2
	@$(BIN)/pytest -m "not thorough" $(SLOW) --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal \
		tests/unit tests/contract tests/golden tests/simulation

SCHEDULES ?= 100000
.PHONY: simulation
simulation: .venv/.dev ## More simulated bad days of a run than the unit tests have: SCHEDULES=100000
	@$(BIN)/python -m tests.simulation $(SCHEDULES)

FAULTS ?= 50
SEED ?= 1
ON ?= local
.PHONY: chaos
chaos: .venv/.dev ## Faults at random times against real runs: FAULTS=50 SEED=1 ON=local,ssh,compose,kubernetes,slurm; root
	@$(BIN)/python -m tests.chaos --faults $(FAULTS) --seed $(SEED) --on $(ON) $(if $(ONLY),--only $(ONLY))

.PHONY: live
live: .venv/.dev ## Tests that start real runs; what fails is run once more, and named FLAKY if it passes
	@$(BIN)/python -m tests.rerun -m "not thorough" $(SLOW) --numprocesses 4 --dist loadscope tests/live

.PHONY: live-here
live-here: .venv/.dev ## On this machine alone: local runs, all programs, parity
	@$(BIN)/python -m tests.rerun -m "not thorough" tests/live/test_*.py

.PHONY: live-nodes
live-nodes: .venv/.dev ## On SSH hosts, in containers, on Kubernetes and Slurm: what there cannot be is skipped
	@$(BIN)/python -m tests.rerun -m "not thorough" tests/live/ssh tests/live/compose tests/live/kubernetes tests/live/slurm

.PHONY: thorough
thorough: .venv/.dev ## The tests that `make test` leaves out because they take long: half an hour; root
	@$(BIN)/pytest -m thorough tests/unit tests/live

.PHONY: lab-test
lab-test: .venv/.dev ## The tests of `make lab` itself, for who changes tests/lab; root
	@$(BIN)/pytest tests/live/ssh/test_lab.py && $(BIN)/python -m tests.tested lab

.PHONY: ansible-test
ansible-test: .venv/.dev ## All tests of the Ansible roles, for who changes ansible/; root
	@$(BIN)/pytest tests/live/ssh/test_ansible.py tests/live/slurm/test_role.py && $(BIN)/python -m tests.tested ansible

.PHONY: kube-test
kube-test: .venv/.dev ## All tests on Kubernetes, which ../shared/kube makes: 25 minutes; root
	@$(BIN)/pytest tests/live/kubernetes

.PHONY: format
format: .venv/.dev ## Lay the code out
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

.PHONY: docs
docs: .venv/.dev ## Write the generated parts of docs/ anew
	@$(BIN)/python -m tests.generated_docs

.PHONY: wheel
wheel: .venv/.dev ## Build the wheel into build/ and try it in an environment of its own
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(OUT) .
	@rm -rf $(OUT)/venv && $(PYTHON) -m venv $(OUT)/venv
	@$(OUT)/venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(OUT)/clusterkit-*.whl
	@$(OUT)/venv/bin/clusterkit --version

.PHONY: clean
clean: ## Remove .venv and what was built
	@rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
