# Every target makes the virtual environment on first use, and again when
# pyproject.toml or constraints.txt changed.
PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto

.DEFAULT_GOAL := help
.PHONY: help demo test lint compile-all clean

help:
	@echo "make demo         train a GraphSAGE and a GAT on Cora, show the plans that ran"
	@echo "make test         run the tests; those that need a GPU are skipped without one"
	@echo "make lint         check style and the import tiers"
	@echo "make compile-all  compile every kernel variant for every supported device"
	@echo "make clean        remove the virtual environment and all caches"

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,train]'
	touch $@

demo: $(READY)
	$(BIN)/python examples/node_classification.py --config configs/cora_sage.yaml
	$(BIN)/python examples/node_classification.py --config configs/cora_gat.yaml

test: $(READY)
	$(PYTEST) $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

compile-all: $(READY)
	$(PYTEST) tests/kernels/test_compile.py --compile-all $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
