# `make help` lists the targets. Everything runs in $(VENV), which is created on first use.
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

BIN    := $(VENV)/bin
STAMP  := $(VENV)/.pleviz-installed
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Nothing is downloaded at run time unless the reader asks for it: HF_HUB_OFFLINE=0 make lab
export HF_HUB_OFFLINE ?= 1

TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PLEVIZ_PROGRESS=0 TOKENIZERS_PARALLELISM=false
NBVAL    := --nbval --nbval-current-env --nbval-sanitize-with tests/nbval_sanitize.cfg \
            --nbval-cell-timeout=120

.DEFAULT_GOAL := help
# transformers versions besides the newest: the oldest supported, and one between
VERSIONS ?= 5.8.1 5.17.0
CORE     := tests/test_table.py tests/test_specs.py tests/test_arithmetic.py tests/test_parity.py \
            $(wildcard tests/test_homes*.py) tests/test_loading.py
TOOLS    := pytest pytest-xdist pytest-timeout hypothesis peft

.PHONY: help run test test-versions test-gpu records lab notebooks lint clean check-python

help: ## list the targets
	@echo "Usage: make TARGET [PYTHON=python3.12] [VENV=.venv] [ARGS='more pytest arguments']"
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

run: $(STAMP) ## execute the notebooks into results/ and print the headline VRAM table
	@PLEVIZ_PROGRESS=0 $(BIN)/python scripts/run_notebooks.py --out results
	@echo
	@$(BIN)/python -m pleviz headline
	@echo
	@echo "Executed notebooks, also as HTML pages: $(CURDIR)/results"

# loadfile: the cells of one notebook share a kernel, so one worker must run all of them
test: $(STAMP) ## run every test, notebooks included
	@$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile $(NBVAL) tests $(wildcard notebooks) $(ARGS)

test-versions: $(VERSIONS:%=.venv-%/.pleviz-installed) ## run the core tests with older transformers
	@for version in $(VERSIONS); do echo "== transformers $$version"; \
	  $(TEST_ENV) .venv-$$version/bin/python -m pytest -q -n 2 --dist loadfile -p no:cacheprovider \
	    $(CORE) $(ARGS) || exit 1; done

.venv-%/.pleviz-installed: pyproject.toml constraints.txt scripts/install.py | check-python
	@test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$* || { rm -rf .venv-$*; exit 1; }
	@.venv-$*/bin/python scripts/install.py --extras gpu --also $(TOOLS) --pin transformers==$*
	@touch $@

test-gpu: $(STAMP) ## run the tests that need an NVIDIA GPU; one that cannot run fails
	@$(TEST_ENV) PLEVIZ_REQUIRE_GPU=1 $(BIN)/python -m pytest -m gpu -n 4 --dist loadfile tests $(ARGS)

records: $(STAMP) ## measure everything again on this machine's NVIDIA GPU, into results/records
	@PYTHON=$(BIN)/python scripts/records.sh results/records

lab: $(STAMP) ## open the notebooks in JupyterLab
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/jupyter lab --notebook-dir=notebooks

notebooks: $(STAMP) ## re-execute the committed notebooks in place and sync their .py pairs
	@PLEVIZ_PROGRESS=0 $(BIN)/python scripts/run_notebooks.py --in-place

lint: $(STAMP) ## check style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

clean: ## remove .venv, results and caches
	rm -rf $(VENV) .venv-* results build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt scripts/install.py | check-python
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	@$(BIN)/python scripts/install.py
	@touch $@

# Order-only, so that it runs each time without making the stamp old
check-python:
	@py=$(BIN)/python; test -x $$py || py=$(PYTHON); \
	$$py -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pleviz needs Python 3.11 or newer; '$$py' is not. Try: make PYTHON=python3.12 <target>" >&2; \
	  exit 1; }
ifneq ($(origin PYTHON),file)
	@test ! -x $(BIN)/python || test "$$($(BIN)/python -V)" = "$$($(PYTHON) -V)" || { \
	  echo "$(VENV) was made with $$($(BIN)/python -V), not $(PYTHON): run 'make clean' first" >&2; \
	  exit 1; }
endif
