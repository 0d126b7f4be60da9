# Everything happens in .venv in this checkout. `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
# A pair that belongs together; empty takes whatever pip finds within pyproject.toml's bounds.
TORCH ?= 2.14.1
TORCHVISION ?= 0.29.1
# More arguments for pip, such as: --no-index --find-links wheels
PIP_ARGS ?=
# More words for the demo, such as: optim.num_epochs=2
ARGS ?=
SANDBOX ?= /tmp/hpctrain-sandbox-$(shell id -u)

BIN := $(VENV)/bin
TORCH_PAIR := $(if $(TORCH),torch==$(TORCH)) $(if $(TORCHVISION),torchvision==$(TORCHVISION))

.PHONY: help demo test test-long lint sandbox sandbox-down slurm-packages clean

help:
	@echo 'make demo          install into $(VENV) and train vision_city_laptop on this machine'
	@echo 'make test          lint, types and tests; installs Slurm for them where it may'
	@echo 'make test-long     the tests with those that take long'
	@echo 'make lint          ruff and mypy'
	@echo 'make sandbox       start a pretended cluster (4 nodes, 32 GPUs) on this machine'
	@echo 'make sandbox-down  end it'
	@echo 'make clean         remove $(VENV) and caches; runs/ and data/ stay'

demo: $(VENV)/installed
	$(BIN)/python -m hpctrain +exp=vision_city_laptop $(ARGS)

test: lint slurm-packages
	$(BIN)/python -m pytest --durations=15

test-long: lint slurm-packages
	$(BIN)/python -m pytest --durations=15 --long

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

sandbox: $(VENV)/installed slurm-packages
	@echo 'Starting the cluster in $(SANDBOX) ...'
	@$(BIN)/python -m tests.helpers.sandbox start $(SANDBOX) > /dev/null
	@$(BIN)/python -m tests.helpers.sandbox status $(SANDBOX)
	@echo 'Now type:'
	@echo "  $$($(BIN)/python -m tests.helpers.sandbox env $(SANDBOX))"
	@echo '  $(BIN)/python -m hpctrain +exp=vision_city_laptop cluster=sandbox'
	@echo 'make sandbox-down ends it (docs/sandbox.md).'

sandbox-down:
	@$(PYTHON) -m tests.helpers.sandbox stop $(SANDBOX)

slurm-packages:
	@bash tests/helpers/install_slurm.sh

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hpctrain needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2> /dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments. Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_ARGS) -e . $(TORCH_PAIR)
	@touch $@

$(VENV)/installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_ARGS) -e '.[dev]' $(TORCH_PAIR)
	@touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
