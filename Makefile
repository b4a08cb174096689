# Two commands to know: `make run` and `make test`. Every target sets itself up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Whoever has bytecode switched off would compile everything anew in each of the many processes.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help run demo test compiled lint format bench torture lock clean vectors

help: ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Holdfast needs Python 3.11 or newer; set PYTHON=python3.x"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[all,dev,bench]'
	@touch $@

run: $(STAMP) ## set up, then start all services on the embedded default
	$(BIN)/holdfast serve

demo: $(STAMP) ## see it work: no network, lost answers, kill -9, and the verdict
	$(BIN)/holdfast demo

test: $(STAMP) ## set up, then lint and run every test (real PostgreSQL, Redis, kill -9)
	$(MAKE) --no-print-directory -j2 lint compiled
	$(BIN)/python -m pytest -n 4 --dist loadgroup

# Test modules are rewritten when they are first read: by one process here, or by each of the four.
compiled: $(STAMP)
	@$(BIN)/python -m pytest --collect-only -q >/dev/null 2>&1 || true

lint: $(STAMP) ## format check, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the code in house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## speed, as ratios against the bare alternative in the same run
	$(BIN)/holdfast bench

torture: $(STAMP) ## the long proofs: simulation, planted bugs, sieges of an hour, races
	$(BIN)/holdfast torture --seconds 600
	$(BIN)/holdfast torture --planted
	$(BIN)/holdfast siege --seconds 1200
	$(BIN)/holdfast siege --seconds 1200 --database postgres
	$(BIN)/holdfast siege --seconds 1200 --database postgres --nats
	HOLDFAST_TEST_ROUNDS=2000 $(BIN)/python -m pytest tests/acceptance

vectors: $(STAMP) ## write the conformance vectors that follow from the core's tables
	$(BIN)/python -m holdfast.proof.vectors --write

lock: ## pin what is installed now
	$(BIN)/python -m pip freeze --exclude-editable | sort -f > constraints.txt

clean: ## remove everything the targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
