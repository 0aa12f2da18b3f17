# `make demo` and `make test` are all a newcomer needs; both install first where that has not been done.

VENV ?= .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# The interpreter that the environment is made with. Empty: the first suitable one on PATH.
PYTHON3 ?=

# torch starts as many threads as there are cores, in each of the tests' processes.
ONE_THREAD := OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help install test check format docs demo clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | sort

install: $(STAMP) ## make .venv and install everything that tests and examples need

# A stamp inside the environment: deleting .venv undoes everything, changed requirements install again.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(PYTHON) -c '' 2>/dev/null; then \
	  for python in $(or $(PYTHON3),python3 python3.13 python3.12 python3.14 python3.11 python); do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; \
	    then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'make install: no Python 3.11 to 3.14 with venv and ensurepip on PATH;' >&2; \
	    echo '  help: install one (Debian, Ubuntu: python3-venv) or say PYTHON3=/path/to/python' >&2; exit 1; \
	  fi; \
	  echo "making $(VENV) with $$($$found --version)"; \
	  $$found -m venv --clear $(VENV); \
	fi
	@echo 'installing into $(VENV) (torch is large: this may take minutes)'
	$(PYTHON) -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

test: install ## run every test
	$(ONE_THREAD) $(PYTHON) -m pytest -n 2 --dist loadfile

check: install ## lint, formatting, types, and who may import whom
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports

format: install ## format the code and mend what can be mended
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: install ## build the site from docs/ into build/docs; a warning is an error
	@$(PYTHON) -m sphinx -q -W --keep-going -d build/doctrees docs build/docs
	@echo 'build/docs/index.html'

demo: install ## compile, explain, verify and train a Qwen3 on 4 processes
	@$(PYTHON) examples/qwen3/train.py

clean: ## remove the environment and all caches
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
