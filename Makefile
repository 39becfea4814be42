# make help    this list
# make train   installs into .venv and trains the quickstart model
# make test    lint, types, import order and the tests
# make test-all   the same with the tests that try every case where make test tries some
# make demos   every shipped experiment whole, some minutes each; the results are in benchmarks/results
# make test-fast  the tests without those that take long
# make docs    the documentation as a site in build/docs, warnings are errors; needs Python 3.11 or newer
# make test-gpu   the suite for a machine with a GPU; without one it runs dry, on the CPU
# make bench-gpu   the benchmarks of one GPU; the tables are in benchmarks/results
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPMENT := $(VENV)/.development
BENCHMARKS := $(VENV)/.benchmarks
# Processes that share the tests; one more than two cores, for some tests wait for their world's start.
JOBS ?= 3

# Files in the order of tests/conftest.py: the long ones first, so that no process waits for one at the end.
PYTEST = $(BIN)/python -m pytest tests --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
# The lint runs next to the tests: most of it is mypy, a minute of one processor. The exit code is the first that is not 0.
LINT_AND = $(MAKE) --no-print-directory lint & lint=$$!; $(PYTEST) $(1); tests=$$?; wait $$lint && exit $$tests

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-fast test-gpu lint docs bench bench-gpu demos clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

train: $(INSTALLED)
	$(BIN)/mgpu-pipe experiment=quickstart $(OVERRIDES)

test: $(DEVELOPMENT)
	@$(call LINT_AND,-m "not exhaustive")

test-all: $(DEVELOPMENT)
	@$(call LINT_AND)

test-gpu: $(DEVELOPMENT)
	$(BIN)/python -m pytest tests/gpu --verbose --numprocesses 8

test-fast: $(DEVELOPMENT)
	$(PYTEST) -m "not slow and not exhaustive"

lint: $(DEVELOPMENT)
	$(BIN)/ruff check mgpu_pipe tests benchmarks scripts examples docs setup.py
	$(BIN)/ruff format --check --quiet mgpu_pipe tests benchmarks scripts examples docs setup.py
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(DEVELOPMENT)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html -d build/doctrees docs build/docs
	@echo build/docs/index.html

bench: $(BENCHMARKS)
	$(BIN)/python -m benchmarks

bench-gpu: $(BENCHMARKS)
	$(BIN)/python -m benchmarks.gpu.gpu_step
	$(BIN)/python -m benchmarks.gpu.one_rank
	$(BIN)/python -m benchmarks.speed.loss_head

demos: $(DEVELOPMENT)
	$(BIN)/python -m benchmarks.accuracy.demos

clean:
	rm -rf $(VENV) build dist *.egg-info

# torch first and pinned: then nothing else pulls another build of it.
$(INSTALLED): pyproject.toml setup.py constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("mgpu_pipe needs Python 3.10 to 3.13") if not (3, 10) <= sys.version_info < (3, 14) else None'
	@echo "installing torch and what else is needed into $(VENV); this takes some minutes, once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

$(DEVELOPMENT): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

$(BENCHMARKS): $(DEVELOPMENT)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[benchmarks]'
	touch $@
