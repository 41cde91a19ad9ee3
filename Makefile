PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build of torch comes first and by its exact version: asked for by another package it may bring gigabytes.
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: setup demo test lint clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, found {v.major}.{v.minor}; make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/leanqkv compare quickstart --out runs/quickstart

test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs
