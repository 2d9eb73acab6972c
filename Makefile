# Everything a user or CI runs. Needs python3 >= 3.11 (with its venv module), make and git; each target builds .venv when it is missing
# or older than its pins. `make PYTHON=python3.12 setup` picks an interpreter, `make ACCEL=cuda12 setup` adds the GPU build of jax.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The first interpreter that is new enough and can make environments; run, not just found: a shim may exist and not work.
PROBE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do $$p -c '$(PROBE)' 2>/dev/null && { echo $$p; break; }; done)
PYTHON312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3.12) python3.12)
ACCEL ?=

PY := .venv/bin/python
# Two workers, each with whole files: tests of a file share compiled programs.
PARALLEL := -n 2 --dist loadfile
# 3.11 has its own pins: jax left it behind after 0.10.
LOCK := $(shell $(or $(PYTHON),true) -c 'import sys; print("requirements/py311.txt" if sys.version_info < (3, 12) else "requirements/py312.txt")' 2>/dev/null)

# $(call build,INTERPRETER,DIRECTORY,LOCK)
define build
$(1) -m venv --clear $(2)
$(2)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(3)
$(2)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/compiled.txt \
	|| echo "no C compiler: going on without pycosat (reasoning-gym's zebra_puzzles needs it)"
endef

.PHONY: help setup quickstart test test-fast test-compat lint format bench parity clean

help:
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 14

.venv/.stamp: requirements/py311.txt requirements/py312.txt requirements/compiled.txt
	@test -n "$(PYTHON)" || { echo "no python3 >= 3.11 with the venv module found; install one (Debian: apt-get install python3 python3-venv) or say make PYTHON=/path/to/python3"; exit 2; }
	$(call build,$(PYTHON),.venv,$(LOCK))
	if [ -n "$(ACCEL)" ]; then $(PY) -m pip install --quiet "jax[$(ACCEL)]==$$(sed -n 's/^jax==//p' $(LOCK))"; fi
	touch $@

.venv-312/.stamp: requirements/py312.txt requirements/compiled.txt
	$(call build,$(PYTHON312),.venv-312,requirements/py312.txt)
	touch $@

# torch serves as the reference of `make parity` alone.
.venv-parity/.stamp: requirements/py311.txt requirements/py312.txt requirements/parity.txt
	$(call build,$(PYTHON),.venv-parity,$(LOCK))
	.venv-parity/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/parity.txt
	touch $@

setup: .venv/.stamp  ## build .venv from the pinned versions

quickstart: .venv/.stamp  ## RL on a real model and a real task, a few steps, CPU
	$(PY) -m launch.train --config=configs/quickstart.py

test: .venv/.stamp  ## all tests, as CI runs them
	$(PY) -m pytest -q $(PARALLEL)

test-fast: .venv/.stamp  ## the tests that take under a few seconds each
	$(PY) -m pytest -q -m "not slow" $(PARALLEL)

test-compat: .venv-312/.stamp  ## the fast tests under Python 3.12 and the newest supported jax
	.venv-312/bin/python -m pytest -q -m "not slow" $(PARALLEL)

lint: .venv/.stamp  ## ruff and pyright
	.venv/bin/ruff check .
	.venv/bin/ruff format --check --quiet .
	.venv/bin/pyright

format: .venv/.stamp  ## rewrite the sources in the project's format
	.venv/bin/ruff check --fix-only .
	.venv/bin/ruff format .

BENCHMARKS := rollout train
bench: .venv/.stamp  ## the CPU benchmarks, results in benchmarks/results/
	mkdir -p benchmarks/results
	for name in $(BENCHMARKS); do $(PY) -m launch.bench $$name --json=benchmarks/results/$$name.json; done

parity: .venv-parity/.stamp  ## compare with transformers + torch, in an environment of its own
	.venv-parity/bin/python -m benchmarks.parity

clean:  ## remove environments and caches, keep runs
	rm -rf .venv .venv-312 .venv-parity .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
