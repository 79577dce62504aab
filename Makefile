# make serve      serve the embedded pair on 127.0.0.1:8000
# make test       run the tests                                   (ARGS='-k window' goes to pytest)
# make check      format, lint, types, import contracts, spelling, protos, manifests
# make fix        rewrite what the formatter and the linter can repair
# make protos     generate deployments/rpc from protos
# make bench      run the benchmarks
# make faults     kill drafters, targets and routers under traffic, overload, upgrade; print what it cost
# make soak       random traffic and random kills for MINUTES=60, then everything must add up
# make fuzz       try hostile inputs on every parser               (MINUTES=5)
# make conformance  foreign clients against a running server   (ARGS='litellm' runs one of them)
# make venv       make the environment alone                      (BACKEND=cuda13 makes the CUDA one)
# make clean      remove environments and build products

# macOS ships make 3.81, which passes over the second line: no recipe relies on it, failures are joined by &&.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv serve test check format lint types imports spelling fix bench faults soak fuzz wheel clean system \
	protos protos-check protos-image manifests audit conformance

HOST ?= 127.0.0.1
HTTP_PORT ?= 8000
ARGS ?=

# mlx-cpu and mlx-cuda-13 install the same library file, so each backend has an environment of its own.
# `default` is Metal on macOS and the CPU on Linux.
BACKEND ?= default
ifeq ($(BACKEND),default)
VENV ?= .venv
SYNC_BACKEND :=
EXPORT_BACKEND :=
else ifeq ($(BACKEND),cuda13)
VENV ?= .venv-cuda13
SYNC_BACKEND := --group cuda13 --no-install-package mlx-cpu
EXPORT_BACKEND := --group cuda13 --no-emit-package mlx-cpu
else
$(error BACKEND is '$(BACKEND)', expected default or cuda13)
endif
BIN := $(VENV)/bin

# The first of these that is 3.11, 3.12 or 3.13; PYTHON=... overrides.
IS_SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(IS_SUPPORTED)' 2>/dev/null && echo $$p && break; done)

# uv from the machine, else one of our own beside the build products.
UV = $(shell uv --version >/dev/null 2>&1 && echo uv || echo build/uv/bin/uv)

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

venv: $(VENV)/.run

# Sizes of one environment: to run, to test, to develop, to fuzz. What was added by hand stays in it.
EXTRAS_run :=
EXTRAS_test := --extra test
EXTRAS_dev := --extra test --extra trace --group dev
EXTRAS_fuzz := --extra test --group fuzz

$(VENV)/.run $(VENV)/.test $(VENV)/.dev $(VENV)/.fuzz: pyproject.toml uv.lock | system
	$(call need-python)
	@mkdir -p build && { [ "$(UV)" = uv ] || [ -x build/uv/bin/uv ] || \
		{ "$(PYTHON)" -m venv build/uv && build/uv/bin/python -m pip install --quiet uv; }; }
	@$(call install,$(patsubst .%,%,$(@F)))
	@touch $@

define need-python
@[ -n "$(PYTHON)" ] || { echo "make: no Python 3.11, 3.12 or 3.13 found; install one or say PYTHON=/path/to/python" >&2; exit 1; }
endef

# uv fetches from the addresses in uv.lock, which are PyPI's. Where pip is pointed at an index of its own
# (PIP_INDEX_URL, pip.conf), or PyPI is out of reach, pip installs the same locked versions from there.
# Bytecode is compiled here: Ray gives its agents 15 seconds to start, and a first import may take longer.
define install
pip_has_index=$$("$(PYTHON)" -m pip config list 2>/dev/null | grep -cE "^(global|install|:env:)\.index-url=" || true); \
if [ "$$pip_has_index" = 0 ] && UV_PROJECT_ENVIRONMENT=$(VENV) $(UV) sync --frozen --inexact --compile-bytecode --python "$(PYTHON)" \
	$(EXTRAS_$(1)) $(SYNC_BACKEND); then :; else \
	echo "make: installing the locked versions with pip" && \
	$(UV) export --quiet --frozen --no-hashes --no-annotate --no-emit-project \
		$(EXTRAS_$(1)) $(EXPORT_BACKEND) -o build/requirements-$(1).txt && \
	{ [ -x $(BIN)/pip ] || "$(PYTHON)" -m venv --clear $(VENV); } && \
	$(BIN)/python -m pip install --no-deps -r build/requirements-$(1).txt && \
	$(BIN)/python -m pip install --no-deps --editable .; \
fi
endef

# What pip cannot install. MLX multiplies matrices 27 times faster with a system OpenBLAS, and compiles
# fused kernels with g++ at run time; it works without both, slowly.
DEBIAN_PACKAGES := libopenblas0-pthread g++
system:
	@[ "$$(uname -s)" = Linux ] || exit 0; \
	PATH="$$PATH:/sbin:/usr/sbin"; \
	case "$$(ldconfig -p)" in *libopenblas.so.0*) has_blas=1;; *) has_blas=;; esac; \
	if [ -z "$$has_blas" ] || ! command -v g++ >/dev/null; then \
		echo "make: slow without OpenBLAS and g++; on Debian or Ubuntu: sudo apt-get install $(DEBIAN_PACKAGES)" >&2; \
	fi

# `up` prints a curl line when it is ready.
serve: $(VENV)/.run
	@exec $(BIN)/dflash-serve up --host $(HOST) --http-port $(HTTP_PORT) $(ARGS)

# Clusters would fight for the cores: they run one after another, behind all other tests. Of what ARGS names,
# either part may have nothing, which pytest calls 5.
NONE_IS_GOOD = $(if $(ARGS),|| [ $$? = 5 ])
test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not ray" $(ARGS) $(NONE_IS_GOOD)
	$(BIN)/python -m pytest -m ray $(ARGS) $(NONE_IS_GOOD)

check: format lint types imports spelling protos-check manifests

format: $(VENV)/.dev
	$(BIN)/ruff format --check

lint: $(VENV)/.dev
	$(BIN)/ruff check

types: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

imports: $(VENV)/.dev
	$(BIN)/lint-imports

spelling: $(VENV)/.dev
	$(BIN)/codespell

# Kubernetes manifests, scripts for Macs and the workflow, offline; `make test` deploys them.
manifests: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "not ray" tests/k8s

# Known vulnerabilities of the locked versions. Asks the network, so it is no part of check.
audit: $(VENV)/.run
	@mkdir -p build
	$(UV) export --quiet --frozen --no-annotate --no-emit-project --extra smg --extra trace $(EXPORT_BACKEND) -o build/requirements-audit.txt
	$(UV) tool run pip-audit@2.10.1 --requirement build/requirements-audit.txt --disable-pip --require-hashes

fix: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Generated code refuses runtimes older than its generator, so the generator is an old one. It wants an older
# protobuf than we run, so it has an environment of its own. The virtual path gives the modules their own names
# (deployments.rpc.dflash.v1...): Ray pickles messages by them.
PROTOC_VERSION := 1.76.0
PROTOC := build/protoc-$(PROTOC_VERSION)
RPC := deployments/rpc
PROTO_SOURCES := $(patsubst protos/%,$(RPC)/%,$(wildcard protos/dflash/*/*.proto))

$(PROTOC)/.made:
	$(call need-python)
	"$(PYTHON)" -m venv --clear $(PROTOC)
	$(PROTOC)/bin/python -m pip install --quiet grpcio-tools==$(PROTOC_VERSION)
	@touch $@

define generate
$(PROTOC)/bin/python -m grpc_tools.protoc -I $(RPC)=protos \
	--python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTO_SOURCES)
endef

protos: $(PROTOC)/.made
	$(call generate,.)

# What is committed is what the generator gives, a client of yesterday still understands us, and the image, of
# which nothing may break, has all that the contract has: compared the other way round, nothing is missing from it.
protos-check: $(VENV)/.dev $(PROTOC)/.made
	$(BIN)/buf lint protos
	$(BIN)/buf format --diff --exit-code protos
	$(BIN)/buf breaking protos --against protos/image.binpb
	@$(BIN)/buf breaking protos/image.binpb --against protos || \
		{ echo "make: protos/image.binpb lacks these; make protos-image adds them" >&2; exit 1; }
	@rm -rf build/protos && mkdir -p build/protos
	@$(call generate,build/protos)
	diff -r build/protos/$(RPC)/dflash $(RPC)/dflash -x __init__.py -x __pycache__

# With whatever is added to the contract: from here on, it must not break.
protos-image: $(VENV)/.dev
	$(BIN)/buf build protos -o protos/image.binpb

bench: $(VENV)/.test
	$(BIN)/dflash-serve bench $(ARGS)

# Both start an application of their own and stop it, also on SIGTERM. ARGS='--only target' picks events.
faults: $(VENV)/.test
	@exec $(BIN)/python -m tests.faults $(ARGS)

soak: $(VENV)/.test
	@exec $(BIN)/python -m tests.faults.soak --minutes $(or $(MINUTES),60) $(ARGS)

# Where there is no atheris, Hypothesis plays alone.
fuzz: $(VENV)/.fuzz
	$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),5) $(ARGS)

# Installs what the clients need under build/conformance, each apart; asks the network, so it is no part of test.
conformance: $(VENV)/.run
	$(BIN)/python -m tests.conformance --uv $(UV) $(ARGS)

wheel:
	$(UV) build

clean:
	rm -rf .venv .venv-cuda13 build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find dflash_core deployments tests -name __pycache__ -type d -prune -exec rm -rf {} +
