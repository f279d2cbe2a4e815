# Everything sets itself up: a virtual environment in .venv, the package and what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Further arguments of pytest, such as ARGS='-k controlnet' or ARGS='-p randomly'.
ARGS ?=
# A part of test-all, such as SHARD=1/4.
SHARD ?= 1/1

.PHONY: demo test test-all test-families test-gpu-compiler gpu-wheels lint docs clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(ARGS)

test-all: $(VENV)/.installed-dev
	DIFFUSAX_TESTS=all $(BIN)/python -m pytest -m 'not full_size and not families and not gpu_compiler' --shard $(SHARD) $(ARGS)

test-families: $(VENV)/.installed-dev
	DIFFUSAX_TESTS=all $(BIN)/python -m pytest -m families $(ARGS)

# XLA's compiler for GPUs, 5 GB in an environment of its own; it needs no GPU. Without the compiler
# every test would be skipped, so the first line fails.
test-gpu-compiler: $(VENV)-gpu/.installed
	JAX_PLATFORMS=cpu $(VENV)-gpu/bin/python -c 'from diffusax.runtime.programs import topology; topology.topology_mesh("h100")'
	JAX_PLATFORMS=cpu $(VENV)-gpu/bin/python -m pytest -n 0 -m gpu_compiler $(ARGS)

$(VENV)-gpu/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-gpu
	$(VENV)-gpu/bin/pip install --quiet --editable '.[test,gpu]'
	touch $@

# What benchmarks/gpu.py needs besides JAX, PyTorch and transformers, for a GPU machine without a network. There:
# pip install --no-index --no-deps --target site .wheels/*.whl && PYTHONPATH=site:src python benchmarks/gpu.py
WHEELS ?= diffusers importlib-metadata flax msgspec tyro docstring-parser
WHEELS_PYTHON ?= 3.12
gpu-wheels:
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --dest .wheels --python-version $(WHEELS_PYTHON) \
		--implementation cp $(foreach n,2_28 2_27 2_17,--platform manylinux_$(n)_x86_64) --platform manylinux2014_x86_64 $(WHEELS)
	ls .wheels

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[docs]'
	$(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-gpu .wheels .ci/venv .pytest_cache .mypy_cache .ruff_cache
