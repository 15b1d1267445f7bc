# Everything a newcomer types. `make train` installs, trains a small model on real text and shows the result.
SUITS := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,\
  $(shell $(name) -c '$(SUITS)' 2>/dev/null && echo $(name))))
# A GPU machine takes the newest torch; elsewhere the version the tests know, and its CPU build where an index has one.
TORCH ?= $(if $(wildcard /proc/driver/nvidia/version),torch,torch==2.13.0)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check --no-input
READY := $(VENV)/.ready
# Whole files side by side, in the order of tests/conftest.py: tests start few ranks and wait for processes much of their time.
TWO := -n 2 --dist loadfile --no-loadscope-reorder
# Cases side by side, where one file has most of them and each makes what it needs.
EACH := -n 2 --dist load --maxschedchunk 1
# What has a target of its own.
OWN := not long and not cluster and not soak
RECIPE ?= recipes/first.toml
BENCHMARKS ?= $(wildcard benchmarks/bench_*.py)

export TOKENIZERS_PARALLELISM := false
# Bytecode is kept: tests start many processes, each of which would compile torch and transformers for four seconds.
unexport PYTHONDONTWRITEBYTECODE

# The path for GPUs is run on machines that have none, with a simulated device under CUDA wheels (4 GB each): the oldest torch
# and transformers that pyproject allows, and the newest.
OLDEST := torch==2.11.0 transformers==5.17.0
NEWEST := torch transformers
ON_NEWEST := $(addprefix tests/ranks/test_,pipeline.py traffic.py reshard.py train_auto.py launch.py) tests/contract/test_verify.py
# What of torch is private may differ between its versions, and how a process with its libraries ends.
PRIVATE := tests/unit/test_torch_compat.py tests/unit/test_process_end.py
# Products in float8 need torchao, which only these environments install: every import of transformers would import it.
FLOAT8 := tests/ranks/test_float8.py
# Kernels whose values Triton's interpreter computes; it comes with CUDA builds alone.
INTERPRETED := tests/unit/test_cross_entropy_kernel.py tests/unit/test_adamw_kernel.py
ENDS := .venv-ghost .venv-newest
CRT_OF_RUNTIME := import importlib.metadata as m; \
  print("nvidia-cuda-crt~=" + ".".join(m.version("nvidia-cuda-runtime").split(".")[:2]) + ".0")

.PHONY: help venv train test extended long soak clusters quick check docs bench ghost newest fuzz mutants clean

help: ## what there is to type
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' Makefile

venv: $(READY) ## a virtual environment with everything in it, made once

$(READY): pyproject.toml
	@test -n "$(PYTHON)" && $(PYTHON) -c '$(SUITS)' || \
	  { echo "meshwright needs Python 3.11 to 3.13 with venv; name one: make PYTHON=/path/to/python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once, some minutes): $(TORCH), then meshwright"
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) "$(TORCH)"
	@$(PIP) --editable '.[dev]'
	@touch $(READY)

train: $(READY) ## train a small model on real text, on all devices found, and show the result
	@$(BIN)/python -m meshwright train $(RECIPE)

check: $(READY) ## style, types, import floors, docstrings
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet meshwright tests benchmarks examples docs/site_pages.py
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python -m tests.house.source

test: check ## what must hold, in two processes; pytest's summary comes last
	@$(BIN)/python -m pytest -m "$(OWN) and not extended" $(TWO)

extended: $(READY) ## what make test holds for one model or layout, for the others
	@$(BIN)/python -m pytest -m "$(OWN) and extended" $(TWO)

docs: $(READY) ## build the site of docs/ into site/; a broken link, a missing anchor or page is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

soak: $(READY) ## more seeds of random faults
	@$(BIN)/python -m pytest -m soak $(TWO)

clusters: $(READY) ## runs on a real Slurm, a real Ray and by a real kubectl on this machine, where they are installed
	@$(BIN)/python -m pytest -m cluster

long: $(READY) .venv-ghost/.ready ## more cases of what the tests try: other models, layouts and places of a fault
	@.venv-ghost/bin/python -m tests.ghost $(EACH) -m long
	@$(BIN)/python -m pytest -m long $(TWO)

quick: $(READY) ## under a minute: unit tests and the house
	@$(BIN)/python -m pytest -m "not slow" $(TWO) tests/unit tests/house

ghost: .venv-ghost/.ready ## run every layout on simulated GPUs; installs a CUDA build of the oldest torch supported
	@.venv-ghost/bin/python -m pytest -m "not long" $(TWO) $(PRIVATE) $(FLOAT8)
	@TRITON_INTERPRET=1 .venv-ghost/bin/python -m pytest $(TWO) $(INTERPRETED)
	@.venv-ghost/bin/python -m tests.ghost $(EACH) -m "not long"

newest: .venv-newest/.ready ## the newest torch and transformers supported: simulated GPUs, then ranks on the CPU
	@.venv-newest/bin/python -m pytest -m "not long" $(PRIVATE) $(FLOAT8)
	@TRITON_INTERPRET=1 .venv-newest/bin/python -m pytest $(INTERPRETED)
	@.venv-newest/bin/python -m tests.ghost $(EACH) -m "not long and not oldest"
	@.venv-newest/bin/python -m pytest -m "not long" $(TWO) $(ON_NEWEST)

.venv-ghost/.ready: PACKAGES := $(OLDEST)
.venv-newest/.ready: PACKAGES := $(NEWEST)
$(ENDS:%=%/.ready): INSTALL = $(@D)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-input
$(ENDS:%=%/.ready): pyproject.toml
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "installing into $(@D) (once, some minutes, 4 GB): $(PACKAGES), as pyproject.toml allows"
	@$(INSTALL) --editable ".[fp8]" $(PACKAGES) pytest pytest-timeout pytest-xdist
	@$(INSTALL) "$$($(@D)/bin/python -c '$(CRT_OF_RUNTIME)')"
	@touch $@

mutants: $(READY) ## plant bugs one by one and count who notices; MUTANTS="--shard 1/8" or "--sample 10"
	@$(BIN)/python -m tests.mutants $(MUTANTS)

bench: $(READY) ## measure; benchmarks/README.md says what
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

fuzz: $(READY) ## damaged files and hostile peers against everything that reads or listens
	@$(BIN)/python -m pytest $(EACH) tests/fuzz

clean: ## forget the environment and the caches; runs stay
	@rm -rf $(VENV) $(ENDS) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
