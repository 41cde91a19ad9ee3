# make demo       set up, then every tool on one small model: a few minutes on 2 cores; ends with runs/demo/report.html
# make real       set up, then a pretrained model: fetched, converted and compared, on 2 cores in minutes
# make test       set up, lint, and the whole test suite: about 10 minutes on 2 cores
# make test-fast  the inner loop: a sample of the tests, without those that train or start processes; under a minute
# make lint       ruff and mypy
# make setup      a virtual environment in .venv, about 2 minutes
# make clean      remove .venv and runs
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build of torch comes first and by its exact version: asked for by another package it may bring gigabytes.
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: setup demo real test test-fast lint clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, found {v.major}.{v.minor}; make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/leanqkv demo --out runs/demo

real: setup
	$(BIN)/python -m experiments.real

test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test-fast: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow'

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs
