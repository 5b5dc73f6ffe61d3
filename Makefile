PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
JOBS ?= 2
PYTEST_ARGS ?=
NAMES ?=
SOAK_ARGS ?=

PY := $(VENV)/bin/python

# An editable install in a shared environment points to the checkout that made it. First on the
# path, this checkout is the one that is imported, here and in every subprocess.
export PYTHONPATH := $(CURDIR)

# A stamp is named after the content that was installed, not compared by file times, which a fresh
# clone sets to now.
KEY := $(shell { $(PYTHON) -V; cat pyproject.toml $(CONSTRAINTS); } | cksum | cut -d ' ' -f 1)
stamp = $(VENV)/.tyxe-$(1)-$(KEY)

EXTRAS_demo := examples,plot,vision
EXTRAS_dev := dev
EXTRAS_docs := docs
EXTRAS_release := examples,release

.DEFAULT_GOAL := help
.PHONY: help demo check test test-all soak lint docs gallery bench dist clean
# Two installations into one environment must not overlap.
.NOTPARALLEL:

help: ## show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "The environment is $(VENV) (VENV=...), made with $(PYTHON) (PYTHON=...) when it is missing"
	@echo "or when pyproject.toml or $(CONSTRAINTS) (CONSTRAINTS=...) changed."

demo: $(call stamp,demo) ## run examples/quickstart.py
	$(PY) examples/quickstart.py

# The time of the linters counts: tests that have not begun 100 seconds after their start are skipped.
check: $(call stamp,dev) ## check style and types, and run the tests of what a change touches, in two minutes
	@until=$$(($$(date +%s) + 100)); $(MAKE) --no-print-directory lint && \
	OMP_NUM_THREADS=1 TYXE_CHECK_UNTIL=$$until $(PY) -m tests.touched -n $(JOBS) $(PYTEST_ARGS)

test: $(call stamp,dev) ## run the tests, without the slow ones (PYTEST_ARGS=..., JOBS=2)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) $(PYTEST_ARGS)

test-all: $(call stamp,dev) ## run all tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(JOBS) -m "slow or not slow" $(PYTEST_ARGS)

soak: $(call stamp,dev) ## run the suites of docs/reliability.md at full size (SOAK_ARGS=...)
	OMP_NUM_THREADS=1 $(PY) -m tests.soak $(SOAK_ARGS)

lint: $(call stamp,dev) ## check style, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(call stamp,docs) ## build docs/_build/html, check it, and run the examples on its pages
	$(PY) -m sphinx -q -W --keep-going -b html -d docs/_build/doctrees docs docs/_build/html
	$(PY) docs/check_site.py docs/_build/html
	$(PY) -m sphinx -q -W --keep-going -b doctest -d docs/_build/doctrees docs docs/_build/doctest

gallery: $(call stamp,dev) ## write and execute the notebooks of notebooks/*.py (NAMES=...)
	$(PY) docs/gallery.py $(NAMES)

# Against another checkout, which has to be named.
REVISIONS := benchmarks/revisions.py

bench: $(call stamp,dev) ## run every benchmark into benchmarks/results/
	@set -e; mkdir -p benchmarks/results; \
	for script in $(filter-out $(REVISIONS),$(wildcard benchmarks/[a-z]*.py)); do \
	    result=benchmarks/results/$$(basename $$script .py).json; \
	    echo "$$script -> $$result"; \
	    $(PY) $$script --json $$result; \
	done

dist: $(call stamp,release) ## build dist/, and run the README's code with its wheel
	rm -rf build dist
	PYTHONPATH= $(PY) -m build --quiet
	PYTHONPATH= $(PY) -m twine check --strict dist/*
	PYTHONPATH= $(PY) .ci/check_wheel.py

clean: ## remove what the targets above wrote, except the environment and benchmark results
	rm -rf build dist docs/_build docs/notebooks docs/experiments *.egg-info
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find tyxe tests examples experiments benchmarks docs -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(PY):
	$(PYTHON) -m venv $(VENV)

# Stamps of other contents go first: what they stand for is no longer what is installed. Pip must
# not see the checkout on the path, or it takes its egg-info for an installation.
$(VENV)/.tyxe-%-$(KEY): | $(PY)
	@find $(VENV) -maxdepth 1 -name '.tyxe-*' ! -name '.tyxe-*-$(KEY)' -exec rm {} +
	PYTHONPATH= $(PY) -m pip install --quiet -e ".[$(EXTRAS_$*)]" -c $(CONSTRAINTS)
	@touch $@
