# `make help` lists the targets. Every target does its own set-up; none does it twice.

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# One thread a process, so that runs repeat and two test workers do not fight over two cores.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
# Nothing here fetches weights or sends figures: models are built from small configs.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Some virtual machines announce AMX and then fault on it: bf16 products stop at what every such machine can do. It is an
# upper limit, so an older processor is not harmed; one set in the environment is kept.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all coverage bench gpu check docs format clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv and install actmem with its development tools

# The first interpreter that is new enough and can make an environment; PYTHON=... names one.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	usable='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'; \
	if ! $(PY) -c "$$usable" 2>/dev/null; then \
	  for candidate in $(or $(PYTHON),python3.11 python3 python3.12 python3.13); do \
	    if "$$candidate" -c "$$usable" 2>/dev/null; then found="$$candidate"; break; fi; \
	  done; \
	  if [ -z "$${found:-}" ]; then \
	    echo "actmem needs Python 3.11 or newer with the venv module; found: $$($(or $(PYTHON),python3) --version 2>&1 | head -n 1)." >&2; \
	    echo "Install one, or name it: make setup PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	  fi; \
	  echo "Creating $(VENV) with $$("$$found" --version)"; \
	  "$$found" -m venv --clear $(VENV); \
	fi
	@echo "Installing actmem and its development tools into $(VENV) (a few minutes the first time)"
	@# Through the environment, so that the pins hold for the build tools too.
	@PIP_CONSTRAINT=constraints.txt $(PY) -m pip install --quiet -e '.[dev]'
	@touch $@

demo: setup ## Train a small model under plain, full and selective; print memory, work and equality
	$(PY) -m actmem demo

test: setup ## Run the tests and the docstring examples
	$(PY) -m pytest -q -n 2 --dist worksteal -m "not slow" tests src --doctest-modules

test-all: setup ## Run everything, full matrices and long searches too
	HYPOTHESIS_PROFILE=many $(PY) -m pytest -q -n 2 --dist worksteal tests src --doctest-modules

coverage: setup ## Run the tests and measure which lines of src/ they reach; pages in build/coverage
	@mkdir -p build/coverage
	$(PY) -m pytest -q -n 2 --dist worksteal -m "not slow" tests src --doctest-modules --cov --cov-report=term --cov-report=html

bench: setup ## Run every benchmark and write benchmarks/results/
	$(PY) -m benchmarks.run

gpu: setup ## Compare with plain and with torch's forms on your accelerator; print a table to send back
	$(PY) -m benchmarks.gpu

check: setup ## Lint, check the format, the types and the direction of imports
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright
	$(VENV)/bin/lint-imports

docs: setup ## Build the documentation into build/docs; a warning is an error
	$(PY) -m sphinx -W --keep-going -q docs build/docs
	@echo "Open build/docs/index.html"

format: setup ## Sort imports, apply safe fixes, format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## Remove the environment and every cache
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	@if [ -d benchmarks ]; then find benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +; fi
