# `make demo` and `make test` do all they need, from a fresh checkout on.
#
#   VENV    where `make setup` puts the Python environment (.venv)
#   PYTHON  the Python that makes it (python3, 3.10 or newer)
#
# On a host whose Python has all that is needed (a CUDA torch, kernels, pytest), use that one: make test VENV= PYTHON=python3

VENV ?= .venv
PYTHON ?= python3

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
CLANG_FORMAT := clang-format
READY :=
else
PY := $(VENV)/bin/python
CLANG_FORMAT := $(VENV)/bin/clang-format
READY := $(VENV)/.ready
endif

CPP_SOURCES = $(shell find kernel_src torch-ext -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.h')
PTXAS_REPORT ?= .build/ptxas.tsv

.PHONY: help setup nvcc build build-cpu build-cuda ptxas-report demo test lint format bench plots clean

help:
	@echo 'make setup       the Python environment in $(VENV)'
	@echo 'make build       the variant that `kernels` loads on this machine (CUDA if its torch is a CUDA one)'
	@echo 'make build-cuda  the CUDA variant for all architectures, GPU or not, and $(PTXAS_REPORT)'
	@echo 'make demo        LTX-Video, stock against injected'
	@echo 'make test        all tests (ARGS="-k rope" to choose)'
	@echo 'make lint        ruff and clang-format, as CI runs them; `make format` applies them'
	@echo 'make bench       the micro-benchmarks (ARGS="--set host" to choose); other benchmarks: benchmarks/README.md'
	@echo 'make plots       the pictures of the README, from the committed results'

setup: $(READY)

# The stamp holds the time of the last install: a changed requirements file installs again.
$(VENV)/.ready: requirements-dev.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --requirement requirements-dev.txt
	touch $@

# nvcc from the package index, only where the machine has none.
nvcc: $(READY)
	@command -v nvcc >/dev/null || test -n "$$CUDA_HOME$$CUDA_PATH" \
	  || $(PY) -m pip install --quiet --no-deps --requirement requirements-nvcc.txt

# A variant that is the tree's already, built here or copied here, is left as it is.
build: $(READY)
	@$(PY) scripts/build_variant.py --check 2>/dev/null \
	  || $(MAKE) --no-print-directory build-$$($(PY) scripts/build_variant.py --print-backend)

build-cpu: $(READY)
	$(PY) scripts/build_variant.py --backend cpu

build-cuda: $(READY) nvcc
	$(PY) scripts/build_variant.py --backend cuda --ptxas-info $(PTXAS_REPORT)

# The committed table of what each kernel takes; CI fails where a build differs from it.
ptxas-report: build-cuda
	cp $(PTXAS_REPORT) benchmarks/results/ptxas.tsv

demo: build
	$(PY) examples/ltx_video/demo.py $(ARGS)

test: build
	$(PY) scripts/build_variant.py --check
	$(PY) -m pytest $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(CLANG_FORMAT) --dry-run -Werror $(CPP_SOURCES)

format: $(READY)
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(CPP_SOURCES)

bench: build
	$(PY) benchmarks/micro.py $(ARGS)

plots: $(READY)
	$(PY) benchmarks/plots.py $(ARGS)

clean:
	rm -rf .build build
