# make demo     install into .venv if need be, then multiply something and say how well it went
# make test     what CI runs: ruff, pyright, lit, pytest
# make check    the quick half of it: ruff, pyright, lit
# make help     all targets
#
# VENV=dir installs elsewhere. PYTHON=path/to/python uses an environment of your own and installs nothing.

VENV  ?= .venv
STAMP := $(VENV)/.installed
JOBS  ?= auto

ifdef PYTHON
READY :=
PY    := $(PYTHON)
export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
else
READY := $(STAMP)
PY    := $(VENV)/bin/python
endif

# A machine with a GPU keeps the torch it has, or gets the CUDA build; every other gets what constraints.txt says.
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
ifeq ($(HAS_GPU),)
VENV_FLAGS :=
PIP_FLAGS  := --constraint constraints.txt
else
VENV_FLAGS := --system-site-packages
PIP_FLAGS  :=
endif

# Tests run CMake, whose make is not to ask this one for a free job.
unexport MAKEFLAGS MFLAGS

.DEFAULT_GOAL := help
.PHONY: help demo install test check lint types lit pytest slow lowest format pages clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY) ## .venv with everything in it

$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV_FLAGS) $(VENV)
	$(VENV)/bin/python -m pip install -qq $(PIP_FLAGS) --editable '.[test]'
	@touch $@

demo: $(READY) ## a real matmul: on the GPU if there is one, else on the CPU and in the emulator
	@$(PY) examples/demo.py

test: lint types lit pytest ## what CI runs

check: lint types lit ## all but pytest

lint: $(READY) ## ruff
	$(PY) -m ruff check .

types: $(READY) ## pyright, strict on dialect/ and passes/
	$(PY) -m pyright --pythonpath $(PY)

lit: $(READY) ## the IR, pass by pass
	$(PY) -c 'from lit.main import main; main()' --verbose lit_tests

pytest: $(READY) ## the numbers
	$(PY) -m pytest -n $(JOBS) --dist worksteal

slow: $(READY) ## the exhaustive sweeps that CI leaves out
	$(PY) -m pytest -n $(JOBS) --dist worksteal -m slow --fresh

# Not part of `test`: it downloads 300 MB. torch stays that of constraints.txt, since PyPI has the lowest one as a CUDA
# build of 3 GB alone; `make lowest TORCH=lowest` takes it.
LOWEST := project/test_cli.py calls/test_cache.py calls/test_matmul_api.py calls/test_torch_op.py kernels/test_cpu.py \
	models/test_checkpoints.py
lowest: ## a few tests with the lowest versions that pyproject.toml allows
	mkdir -p build
	python3 .ci/lowest.py $(TORCH) > build/lowest.txt
	python3 -m venv --clear build/lowest
	build/lowest/bin/python -m pip install -qq --constraint build/lowest.txt --editable '.[test]'
	build/lowest/bin/python -m pytest -n $(JOBS) $(addprefix pytests/,$(LOWEST))

format: $(READY) ## sort imports and mend what ruff can mend
	$(PY) -m ruff check --fix .

pages: $(READY) ## the pages and pictures of docs/explain.md, and pictures of layouts
	LOWBIT_CPU=x86-64-v3 $(PY) -m lowbit.pylib.explain.pictures docs

clean: ## remove .venv, build/ and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
