# Everything a newcomer needs: `make demo` and `make test`. `make help` lists the rest.
#
# The only requirements are Python >= 3.11 with venv and pip. The environment in .venv is made from
# requirements/lock.txt with hashes checked, and made again only when the lock or pyproject.toml
# changes.

SHELL := /bin/sh
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The newest suitable interpreter unless the caller names one: `make PYTHON=/opt/python3.13 demo`.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$name; break; }; done)

# Two worker threads of a BLAS per test process are slower than none on a small machine.
export OPENBLAS_NUM_THREADS ?= 1

PYTEST_ARGS ?=
# Test processes side by side; most of their time is waiting. WORKERS=0: none, in this process.
WORKERS ?= auto

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## */  make \1\t/' \
		| expand -t 20

.PHONY: demo
demo: $(READY) ## bring a real model up on three virtual boards and build the dashboard
	$(BIN)/harness demo

.PHONY: test
test: lint types tests ## lint, types and every test that needs no hardware

.PHONY: tests
tests: $(READY) ## the tests alone; PYTEST_ARGS="-k lease" narrows them
	$(BIN)/pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

.PHONY: device
device: $(READY) ## the four bring-up stages as tests, on the boards of devices.yaml
	$(BIN)/pytest -m device $(PYTEST_ARGS)

CHAOS_ARGS ?=

.PHONY: chaos
chaos: $(READY) ## a night on twelve bad virtual boards; CHAOS_ARGS="--minutes 0.5"
	@$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

BENCH ?=
BENCH_ARGS ?=

.PHONY: bench
bench: $(READY) ## speed as ratios (llama.cpp, bandwidth, on/off); BENCH="prefill trace"
	@$(BIN)/python -m tests.bench $(BENCH) $(BENCH_ARGS)

PLANTED ?=
PLANTED_ARGS ?=

.PHONY: bench-bisect
bench-bisect: $(READY) ## are planted races, commits, faults, crashes named? PLANTED="races"
	@$(BIN)/python -m tests.planted $(PLANTED) $(PLANTED_ARGS)

.PHONY: sanitize
sanitize: $(READY) ## the engine's tests over address, thread and undefined-behaviour builds
	$(BIN)/python -m harness.deploy.sanitize $(SANITIZE)

.PHONY: lint
lint: $(READY) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: $(READY) ## mypy --strict on engine, harness and dashboards
	$(BIN)/mypy

.PHONY: format
format: $(READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: env
env: $(READY) ## only the environment in .venv

$(READY): requirements/lock.txt pyproject.toml
	@test -n "$(PYTHON)" || { \
		echo "found no Python >= 3.11 with venv and pip; install one (Debian: python3-venv)" \
			"or name it: make PYTHON=/path/to/python3" >&2; exit 2; }
	@# A .venv whose interpreter is gone or too old is made anew, not mended.
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r requirements/lock.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--no-build-isolation --editable .
	@touch $@

.PHONY: lock
lock: ## resolve requirements/lock.txt again from pyproject.toml (needs pip-tools on PATH)
	pip-compile --quiet --strip-extras --all-extras --allow-unsafe --build-deps-for editable \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--no-header --output-file requirements/lock.txt pyproject.toml

.PHONY: clean
clean: ## stop virtual boards; remove the environment, results and caches of this checkout
	@-$(BIN)/python -c 'from harness.boards.virtual import stop_all; stop_all()' 2>/dev/null
	rm -rf $(VENV) .harness .mypy_cache .ruff_cache .pytest_cache .hypothesis
