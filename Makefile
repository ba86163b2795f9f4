# Two commands matter: `make demo` does the main job, `make test` runs the tests.
# Both set up what they need first. PYTHON=python3.12 make test  picks another interpreter.

PYTHON ?= python3
VENV := .venv
BASE_VENV := .venvs/base
BIN := $(VENV)/bin

.PHONY: help setup demo test test-slow lint proto clean

help:
	@echo "make demo       train over endpoints, serve the result, evaluate it from outside"
	@echo "make test       lint, types and all tests but the slow ones"
	@echo "make test-slow  the slow tests"
	@echo "make proto      regenerate the code under rlmesh_ray/wire/_pb"
	@echo "make clean      remove the virtual environments and what the runs wrote"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[rllib,dev]'
	@touch $@

# What a simulator's machine has: the base install, without Ray and torch.
$(BASE_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BASE_VENV)
	$(BASE_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

demo: setup
	$(BIN)/python -m rlmesh_ray.cli.demo --out runs/demo

test: setup $(BASE_VENV)/.ready lint
	$(BIN)/python -m pytest -m 'not slow' --durations=10

test-slow: setup $(BASE_VENV)/.ready
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

proto: setup
	$(BIN)/python proto/generate.py

clean:
	rm -rf $(VENV) .venvs runs build dist *.egg-info
