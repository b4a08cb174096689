# `make run` starts the server, `make test` runs every check. Every target installs what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SERVER := $(VENV)/.server
SETUP  := $(VENV)/.setup

# With bytecode switched off, each of the many test processes would compile everything again.
export PYTHONDONTWRITEBYTECODE :=

# uv installs in a fifth of pip's time, but does not read pip's configuration: where it cannot
# install (a private index, a platform without uv), pip does.
OPTIONS := --quiet --constraint constraints.txt
PIP     := $(BIN)/python -m pip install --disable-pip-version-check --no-compile $(OPTIONS)
UV      := UV_HTTP_TIMEOUT=20 UV_HTTP_RETRIES=1 UV_LINK_MODE=copy $(BIN)/uv pip install --python $(BIN)/python $(OPTIONS)
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
comma   := ,
install = $(UV) $(1) || { echo "uv failed: installing with pip"; $(BIN)/python -m ensurepip >/dev/null; $(PIP) $(1); }
PROJECTS := $(wildcard packages/*/pyproject.toml)

.DEFAULT_GOAL := help
.PHONY: help run demo test test-min compiled lint format bench proof setup docs lock clean vectors

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Holdfast needs Python 3.11 or newer; set PYTHON=python3.x"; exit 1; }
	$(PYTHON) -m venv --without-pip $(VENV)
# The pip that is there already takes two seconds less than installing one with ensurepip first.
	@$(PYTHON) -m pip --python $@ install --disable-pip-version-check --no-compile $(OPTIONS) pip uv 2>/dev/null \
		|| { $@ -m ensurepip >/dev/null && $(PIP) uv 2>/dev/null; } || true

$(SERVER): $(PROJECTS) constraints.txt | $(BIN)/python
	@echo "installing the server in $(VENV)"
	@$(call install,--editable packages/holdfast --editable packages/services)
	@touch $@

$(SETUP): $(PROJECTS) constraints.txt requirements-dev.txt | $(BIN)/python
	@echo "installing all packages and tools in $(VENV)"
	@$(call install,--editable 'packages/holdfast[all$(comma)testing]' --editable 'packages/services[all]' --editable 'packages/lab[bench]' --requirement requirements-dev.txt)
	@touch $(SERVER) $@

setup: $(SETUP) ## install all packages, extras, test servers and tools

run: $(SERVER) ## install the server, then start all services on SQLite
	$(BIN)/holdfast serve

demo: $(SETUP) ## lost responses, kill -9, and one effect per action
	$(BIN)/holdfast demo

test: $(SETUP) ## lint, then run every test (real PostgreSQL, Redis, NATS, kill -9)
	$(MAKE) --no-print-directory -j2 lint compiled
	$(BIN)/python -m pytest -n 4 --dist loadgroup

# Each direct requirement in the lowest version that pyproject.toml allows; then the tools, which
# keep what is installed. Old releases warn about the new ones below them: not an error here.
test-min: $(SETUP) ## the library's tests with the oldest versions of its dependencies
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)-min
	UV_LINK_MODE=copy $(BIN)/uv pip install --quiet --python $(VENV)-min/bin/python --resolution lowest-direct \
		--editable 'packages/holdfast[all$(comma)testing]' --editable 'packages/services[all]' --editable packages/lab \
		'opentelemetry-sdk>=1.25'
	UV_LINK_MODE=copy $(BIN)/uv pip install --quiet --python $(VENV)-min/bin/python --requirement requirements-dev.txt
	$(VENV)-min/bin/python -m pytest -n 4 --dist loadgroup -p no:cacheprovider -W ignore::DeprecationWarning \
		packages/holdfast/tests --ignore packages/holdfast/tests/acceptance

# Test modules are compiled when first imported: once here, not by each of the four processes.
compiled: $(SETUP)
	@$(BIN)/python -m pytest --collect-only -q >/dev/null 2>&1 || true

lint: $(SETUP) ## formatting, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(SETUP) ## reformat the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(SETUP) ## speed, as ratios against the bare alternative in the same run
	$(BIN)/holdfast bench

proof: $(SETUP) ## the long proofs: simulation, planted bugs, an hour of chaos, races
	$(BIN)/holdfast simulate --seconds 600
	$(BIN)/holdfast simulate --planted
	$(BIN)/holdfast chaos --seconds 1200
	$(BIN)/holdfast chaos --seconds 1200 --database postgres
	$(BIN)/holdfast chaos --seconds 1200 --database postgres --nats
	HOLDFAST_TEST_ROUNDS=2000 $(BIN)/python -m pytest packages/holdfast/tests/acceptance

docs: $(SETUP) ## build the documentation site into site/ (strict)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

vectors: $(SETUP) ## write the conformance vectors that follow from the core's tables
	$(BIN)/python -m holdfast_lab.vectors --write

lock: $(SETUP) ## pin the versions that are installed now
	$(BIN)/python -m pip freeze --exclude-editable | sort -f > constraints.txt

clean: ## remove everything the targets made
	rm -rf $(VENV) $(VENV)-min site .pytest_cache .mypy_cache .ruff_cache .hypothesis
