# `make help` lists the targets. Everything runs in .venv, created on first use from requirements/dev.txt.

# Settings, all optional:  make test WORKERS=8   make demo PYTHON=/usr/local/bin/python3.12
PYTHON    ?=
WORKERS   ?= 2
ARGS      ?=
PIP_FLAGS ?=

# CUDA builds of torch bring the Triton they need; beside a CPU build this one runs the kernels in its interpreter.
TRITON := triton==3.6.0

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint clean

# An environment that was moved with its folder has stale paths inside: build it again.
AT_HOME := $(shell grep -sF "$(CURDIR)/$(VENV)" $(VENV)/pyvenv.cfg)
ifeq ($(AT_HOME),)
.PHONY: $(READY)
endif

help:
	@echo "make demo      train two small language models on text that ships with Python, compare and sample them"
	@echo "make test      ruff, mypy and the tests (without the slow ones)"
	@echo "make test-all  the same with the slow tests and more random examples"
	@echo "make lint      ruff and mypy only"
	@echo "make clean     remove .venv, caches and build products; runs/ stays"
	@echo
	@echo "PYTHON=...     the Python (>= 3.11) that creates .venv; default: the first of python3, python3.13, ..."
	@echo "PIP_FLAGS=...  extra flags for pip. PyPI's torch for Linux carries CUDA (gigabytes); for a CPU-only build:"
	@echo "               PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'"
	@echo "WORKERS=n      test processes (default 2)      ARGS=...  extra flags for pytest"

demo: $(READY)
	@$(BIN)/axes demo

test: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slow" --doctest-modules axes tests $(ARGS)

test-all: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --hypothesis-profile=thorough \
		--doctest-modules axes tests $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/mypy axes

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements/dev.txt pyproject.toml
	@if [ -z "$(AT_HOME)" ] || ! $(BIN)/python -c "import pip" 2>/dev/null; then \
		found=; \
		for candidate in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python); do \
			if "$$candidate" -c "import sys; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1; then \
				found=$$candidate; break; \
			fi; \
		done; \
		if [ -z "$$found" ]; then \
			echo "error: no Python >= 3.11 found (tried: $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python))." >&2; \
			echo "Install one, or say where it is: make PYTHON=/path/to/python3.12" >&2; \
			exit 1; \
		fi; \
		if ! "$$found" -c "import ensurepip, venv" >/dev/null 2>&1; then \
			echo "error: $$found has no venv module, which creates the environment." >&2; \
			echo "Debian and Ubuntu: apt install python3-venv. Or name another: make PYTHON=/path/to/python3.12" >&2; \
			exit 1; \
		fi; \
		echo "creating $(VENV) with $$("$$found" --version)"; \
		"$$found" -m venv --clear $(VENV) || exit 1; \
	fi; \
	echo "installing the pinned packages of requirements/dev.txt (some minutes the first time)"; \
	if [ -t 1 ]; then quiet=; else quiet=--quiet; fi; \
	$(BIN)/python -m pip install $$quiet --disable-pip-version-check -r requirements/dev.txt $(PIP_FLAGS) || { \
		echo "error: pip could not install requirements/dev.txt: its last lines above say which package." >&2; \
		echo "Without a network, give pip a folder of wheels: make PIP_FLAGS='--no-index --find-links DIR'" >&2; \
		exit 1; \
	}; \
	if [ "$$(uname)" = Linux ] && ! $(BIN)/python -c "import triton" 2>/dev/null; then \
		$(BIN)/python -m pip install $$quiet --disable-pip-version-check $(TRITON) $(PIP_FLAGS) || exit 1; \
	fi; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . || exit 1; \
	touch $(READY)
