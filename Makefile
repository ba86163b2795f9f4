# Two commands matter: `make demo` does the main job, `make test` runs the tests.
# Both set up what they need first. PYTHON=python3.12 make test  picks another interpreter.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BASE_VENV := .venvs/base
B3_VENV := .venvs/b3
RELEASED_VENV := .venvs/released
DM_ENV_RPC_VENV := .venvs/dm_env_rpc
REMOTE_GYM_VENV := .venvs/remote_gym
OPENPI_VENV := .venvs/openpi
RLLINK_EXTRA := .venvs/rllink
METRICS_EXTRA := .venvs/ray_metrics
SIMULATORS_VENV := .venvs/simulators
TRAINERS_EXTRA := .venvs/trainers
SERVE_EXTRA := .venvs/ray_serve
NODE_MODULES := examples/javascript/node_modules
BIN := $(VENV)/bin
# How many files of tests run at a time. Many wait for a process that starts: with three files, two
# cores take a tenth less time than with two.
TEST_WORKERS ?= 3
# Each process of NumPy would start, and keep awake for a while, a thread for each core.
PYTEST := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --max-worker-restart 0
# How long `make fuzz` runs each target.
FUZZ_SECONDS ?= 60

.PHONY: help setup demo bench docs house test test-slow coverage mutants faults nightly chaos versions fuzz lint proto clean

help:
	@echo "make demo       train over endpoints, serve the result, evaluate it from outside"
	@echo "make test       lint, types and all tests but the slow ones"
	@echo "make test-slow  the slow tests"
	@echo "make coverage   lines and branches of the core that the tests run, by room; pages under runs/coverage"
	@echo "make mutants    change the core at MUTANTS=300 places drawn with SEED=1; print what no unit test notices"
	@echo "make faults     plant the known faults one by one; fails where no test of the public surface finds one"
	@echo "make bench      measure ours beside peers, write docs/benchmarks/figures.md; BENCH='stepping' chooses"
	@echo "make docs       build the site in runs/docs"
	@echo "make house      figures of the package's order: statements, modules, classes, Protocols; fails above their limits"
	@echo "make nightly    fuzzing, long walks and all pairs with peers; real simulators"
	@echo "make chaos      kill, freeze and cut endpoints while clients step; writes docs/benchmarks/trials.md"
	@echo "make versions   loopback tests with the lowest and the newest dependencies, Python 3.11 and 3.13"
	@echo "make fuzz       fuzz every decoder, FUZZ_SECONDS=60 each"
	@echo "make proto      regenerate the code under rlmesh_ray/wire/_pb"
	@echo "make clean      remove the virtual environments and what the runs wrote"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Ray, torch and the tools of the tests are installed into $(VENV): 3 GB, some minutes without output"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[rllib,dev]'
	@touch $@

# What a simulator's machine has: the base install, without Ray and torch.
$(BASE_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BASE_VENV)
	$(BASE_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

# The published peer of this generation; gymnasium and NumPy as here, so that values can be compared.
$(B3_VENV)/.ready: tests/peers/rlmesh_b3/requirements.txt constraints.txt
	$(PYTHON) -m venv $(B3_VENV)
	$(B3_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	@touch $@

# The released peer, of another generation, with torch: for tests, and for the bench to compare with.
$(RELEASED_VENV)/.ready: tests/peers/rlmesh_released/requirements.txt constraints.txt
	$(PYTHON) -m venv $(RELEASED_VENV)
	$(RELEASED_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	@touch $@

# A peer with a protocol of its own, which the bench compares with, too.
$(DM_ENV_RPC_VENV)/.ready: tests/peers/dm_env_rpc/requirements.txt constraints.txt
	$(PYTHON) -m venv $(DM_ENV_RPC_VENV)
	$(DM_ENV_RPC_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	@touch $@

# Servers and clients of dm_env_rpc that others wrote; they want an older protobuf than ours, so that
# their requirements name all versions themselves.
$(REMOTE_GYM_VENV)/.ready: tests/peers/remote_gym/requirements.txt
	$(PYTHON) -m venv $(REMOTE_GYM_VENV)
	$(REMOTE_GYM_VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# openpi's published client, which wants an older NumPy than ours: likewise.
$(OPENPI_VENV)/.ready: tests/peers/openpi/requirements.txt
	$(PYTHON) -m venv $(OPENPI_VENV)
	$(OPENPI_VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# What Ray needs to speak RLlink: a folder for the paths of the peers' processes.
$(RLLINK_EXTRA)/.ready: tests/peers/rllink/requirements.txt $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(RLLINK_EXTRA) -r $<
	@touch $@

# What Ray needs to export metrics: likewise.
$(METRICS_EXTRA)/.ready: tests/peers/ray_metrics/requirements.txt $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(METRICS_EXTRA) -r $<
	@touch $@

# Simulators that others wrote, at the versions of their requirements, with the base install.
$(SIMULATORS_VENV)/.ready: tests/simulators/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(SIMULATORS_VENV)
	$(SIMULATORS_VENV)/bin/pip install --quiet --disable-pip-version-check -e . -r $<
	@touch $@

# Trainers that others wrote: a folder for the paths of the tests' processes, which share our torch.
$(TRAINERS_EXTRA)/.ready: tests/peers/trainers/requirements.txt $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(TRAINERS_EXTRA) -r $<
	@touch $@

# What Ray Serve needs: likewise.
$(SERVE_EXTRA)/.ready: tests/peers/ray_serve/requirements.txt tests/peers/ray_metrics/requirements.txt $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(SERVE_EXTRA) -r $<
	@touch $@

# What the examples in JavaScript need; Node.js itself came with the development packages.
$(NODE_MODULES)/.ready: examples/javascript/package-lock.json $(VENV)/.ready
	cd $(dir $(NODE_MODULES)) && PATH="$(abspath $(BIN)):$$PATH" npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py --out runs/demo

# BENCH='stepping --only vector --vs sync' chooses, and leaves the page as it is, unless
# PAGE=docs/benchmarks/figures.md says that these sections be replaced. All takes some hours.
BENCH ?=
bench: PAGE ?= $(if $(BENCH),,docs/benchmarks/figures.md)
bench: export PYTHONPATH := $(abspath $(TRAINERS_EXTRA)):$(abspath $(SERVE_EXTRA))
bench: setup $(RELEASED_VENV)/.ready $(DM_ENV_RPC_VENV)/.ready $(SIMULATORS_VENV)/.ready $(TRAINERS_EXTRA)/.ready \
    $(SERVE_EXTRA)/.ready $(NODE_MODULES)/.ready
	$(if $(PAGE),set -o pipefail;) $(BIN)/python -m benchmarks $(BENCH) $(if $(PAGE),--json \
	  | $(BIN)/python -m benchmarks.page $(PAGE) --command "$(strip python -m benchmarks $(BENCH))")

docs: setup
	$(BIN)/python -m sphinx -qEW --keep-going -n docs runs/docs
	@echo "open runs/docs/index.html"

house: setup
	$(BIN)/python -m tests.house

test: setup $(BASE_VENV)/.ready $(B3_VENV)/.ready $(NODE_MODULES)/.ready lint house
	$(PYTEST) -m 'not slow and not nightly' --durations=10

fuzz: setup
	@mkdir -p runs/fuzz
	@for target in $$($(BIN)/python -c 'from tests.fuzz.targets import TARGETS; print(*TARGETS)'); do \
	  echo "$$target, $(FUZZ_SECONDS) s"; \
	  $(BIN)/python -m tests.fuzz.fuzz $$target runs/fuzz/$$target -max_total_time=$(FUZZ_SECONDS) \
	    -max_len=4096 -timeout=20 -artifact_prefix=runs/fuzz/$$target- 2>runs/fuzz/$$target.log \
	    || { tail -n 40 runs/fuzz/$$target.log; exit 1; }; \
	done

# In the order of the files: by their numbers of tests, one of seven minutes would come last, alone.
test-slow: setup $(BASE_VENV)/.ready $(B3_VENV)/.ready $(RELEASED_VENV)/.ready $(DM_ENV_RPC_VENV)/.ready \
    $(REMOTE_GYM_VENV)/.ready $(OPENPI_VENV)/.ready $(RLLINK_EXTRA)/.ready $(METRICS_EXTRA)/.ready $(TRAINERS_EXTRA)/.ready \
    $(NODE_MODULES)/.ready
	$(PYTEST) -m 'slow and not nightly' --no-loadscope-reorder --durations=20

# The rooms whose coverage is reported, and the tests that are theirs.
COVERED_ROOMS := protocol transport spaces wire server client envs
COVERED_TESTS := $(COVERED_ROOMS:%=tests/unit/%) tests/compliance \
  $(filter-out $(patsubst %,tests/loopback/test_%,bench% cli% dm_env_rpc% evaluation% released% rllink%), \
    $(wildcard tests/loopback/test_*.py))
coverage: setup
	@rm -rf runs/coverage
	@mkdir -p runs/coverage
	$(BIN)/coverage run -m pytest -n $(TEST_WORKERS) --dist loadfile --max-worker-restart 0 \
	  -m 'not slow and not nightly' $(COVERED_TESTS)
	$(BIN)/coverage combine --quiet
	@rm -f runs/coverage/data.* # what processes that were killed had begun to write
	$(BIN)/coverage html --quiet
	@for room in $(COVERED_ROOMS); do \
	  printf '%-10s %s %%\n' $$room $$($(BIN)/coverage report --include="rlmesh_ray/$$room/*" --precision=1 --format=total); \
	done

# MUTANTS=50 tries fewer of the same sample, SEED=2 others, MUTANTS='50 --room client' those of one room. The
# first run collects which test reaches which function; results stay in mutants/ until `make clean`.
MUTANTS ?= 300
mutants: setup
	$(BIN)/python -m tests.mutants --number $(MUTANTS) --seed $(SEED)

# FAULTS='--room server' chooses, or names of faults. All take 16 minutes on busy cores.
FAULTS ?=
faults: setup
	$(BIN)/python -m tests.faults $(FAULTS)

# Tests of hours, in the order of their files; then simulators: SIMULATORS='pong minigrid' chooses.
nightly: setup $(BASE_VENV)/.ready $(B3_VENV)/.ready $(RELEASED_VENV)/.ready $(DM_ENV_RPC_VENV)/.ready \
    $(REMOTE_GYM_VENV)/.ready $(RLLINK_EXTRA)/.ready $(TRAINERS_EXTRA)/.ready $(SIMULATORS_VENV)/.ready
	$(PYTEST) -m nightly --no-loadscope-reorder --durations=20
	$(PYTEST) -m 'not slow' --hypothesis-profile=nightly tests/unit
	$(BIN)/python -m tests.simulators.nightly $(SIMULATORS) --page docs/benchmarks/simulators.md

# ROWS='cut_join kill' chooses, by the beginnings of names, and leaves the page as it is, unless
# PAGE=docs/benchmarks/trials.md says that the lines of these rows be replaced; SEED=2 draws other moments.
# A full run takes about two hours; ROWS=soak SOAK_MINUTES=120 looks for what grows.
ROWS ?=
SOAK_MINUTES ?= 10
SEED ?= 1
chaos: PAGE ?= $(if $(ROWS),,docs/benchmarks/trials.md)
chaos: setup
	$(BIN)/python -m tests.chaos.trials $(ROWS) --seed $(SEED) --soak-minutes $(SOAK_MINUTES) $(if $(PAGE),--page $(PAGE))

# VERSIONS='--python 3.13 --kind lowest' chooses; what follows a -- goes to pytest.
versions: setup
	$(BIN)/python -m tests.versions $(VERSIONS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

proto: setup
	$(BIN)/python proto/generate.py

clean:
	rm -rf $(VENV) .venvs $(NODE_MODULES) runs mutants build dist *.egg-info
