# `make` lists the commands. A fresh machine needs `make demo` and `make test`; both set up .venv by themselves.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
TESTS ?= tests
ARGS ?=

BIN := $(VENV)/bin
# written last, so that a set-up that was cut short is done again
STAMP := $(VENV)/.installed
comma := ,
EXTRAS := dev,torch$(if $(shell command -v nvidia-smi),$(comma)cuda)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format docs results bench hub-kernel clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with everything that the other commands need (PYTHON=python3.12 chooses the Python)

$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fly needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try make PYTHON=python3.12"; exit 1; }
	@echo "Setting up $(VENV) with fly[$(EXTRAS)]; once, one to three minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# without bytecode, which is as much work as everything else here: Python compiles what is imported, when it is
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $(STAMP)
	@echo "$(VENV) is ready: $$($(BIN)/python --version)"

demo: $(STAMP) ## compile flash attention for AMD and NVIDIA, check it, run it where something can, show what it costs
	$(BIN)/python examples/demo.py $(ARGS)

test: $(STAMP) ## run the tests (TESTS=tests/ir for some of them, WORKERS=8 for more processes)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS) $(ARGS)

lint: $(STAMP) ## check formatting and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP) ## format, and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## build the documentation as a site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

results: $(STAMP) ## make docs/results.md from the files in benchmarks/results
	$(BIN)/python -m benchmarks.results

bench: $(STAMP) ## time flash attention forward on a GPU against what else is installed (ARGS='--help' shows more)
	$(BIN)/python benchmarks/flash_attn_fwd.py $(ARGS)

hub-kernel: $(STAMP) ## build a kernel for Hugging Face's hub, into dist/hub (ARGS='--help' shows more)
	$(BIN)/python -m hub.build $(ARGS)

clean: ## remove .venv and everything that the other commands made
	rm -rf $(VENV) build dist site *.egg-info fly_dump .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
