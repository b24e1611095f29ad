# Everything runs inside .venv, which holds exactly what requirements.lock says.
# Needed beforehand: python3 >= 3.11 with venv, and make.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check
LOCKED := $(VENV)/.locked
READY := $(VENV)/.ready
UV ?= .tools/bin/uv
ARGS ?=
# Tests that want the machine for themselves.
ALONE := tests/spark tests/pipelines tests/live_clients tests/ui

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup test lint format bench run lock clean

help: ## Print this list
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

setup: $(READY) ## Create .venv with the locked versions (a no-op when up to date)
	@:

test: lint ## Check format, lint and types, then run the tests (ARGS="-k name")
ifeq ($(ARGS),)
	@echo "== pytest"
	@$(PY) -m pytest -n 2 $(addprefix --ignore=,$(ALONE))
	@echo "== pytest: Spark and a browser"
	@$(PY) -m pytest $(ALONE)
else
	@echo "== pytest"
	@$(PY) -m pytest -n 2 $(ARGS)
endif

lint: $(READY) ## Check format, lint and types
	@echo "== ruff format --check"
	@$(PY) -m ruff format --check
	@echo "== ruff check"
	@$(PY) -m ruff check
	@echo "== mypy"
	@$(PY) -m mypy

format: $(READY) ## Format the code and apply the safe lint fixes
	@$(PY) -m ruff check --fix-only
	@$(PY) -m ruff format

bench: $(READY) ## Run the benchmarks (ARGS="...")
	@$(PY) -m benchmarks $(ARGS)

run: $(READY) ## Run the server (ARGS="--port 4001")
	@$(PY) -m topics serve $(ARGS)

lock: $(UV) ## Write requirements.lock again (ARGS=--upgrade for newer versions)
	@$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--extra dev --group build --custom-compile-command "make lock" \
		--output-file requirements.lock $(ARGS) pyproject.toml
	@echo "requirements.lock is up to date"

clean: ## Remove .venv, caches and build output
	@rm -rf $(VENV) .tools build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# A venv knows its own path. In a copied or moved checkout the old one would import, and so test, the code of
# the old place: build a new one there, and also when the Python below it is gone.
ifneq ($(shell test -x $(PY) && cat $(READY) 2>/dev/null),$(CURDIR))
.PHONY: $(LOCKED)
endif

define check_python
@command -v $(PYTHON) >/dev/null || { \
	echo "topics needs Python 3.11 or newer, and '$(PYTHON)' was not found." \
		"Install it, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "topics needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
		"Name a newer one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	echo "'$(PYTHON)' cannot create virtual environments: its venv or ensurepip module is missing." \
		"On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
endef

# Built from nothing whenever the lock changes, so that no dropped dependency lingers.
$(LOCKED): requirements.lock
	$(check_python)
	@echo "== creating $(VENV)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@echo "== installing requirements.lock"
	@$(PIP) install --require-hashes -r requirements.lock
	@touch $@

$(READY): $(LOCKED) pyproject.toml
	@echo "== installing topics (editable)"
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@echo "$(CURDIR)" > $@

.tools/bin/uv:
	$(check_python)
	@$(PYTHON) -m venv .tools
	@.tools/bin/python -m pip --quiet --disable-pip-version-check install uv
