# `make help` lists the targets. Everything runs in an environment that requirements/setup.sh makes on first use from
# the pinned packages of requirements/dev.txt.

# Settings, all optional:  make test WORKERS=8   make demo PYTHON=/usr/local/bin/python3.12   make test STOCK=1
PYTHON    ?=
WORKERS   ?= 2
ARGS      ?=
PIP_FLAGS ?=
STOCK     ?=

ifneq ($(filter-out 1,$(STOCK)),)
$(error STOCK is 1 or empty, got "$(STOCK)": `make help` says what it does)
endif

override VENV := $(if $(STOCK),.venv-stock,.venv)
BIN   := $(VENV)/bin
READY := $(VENV)/.ready

# The site's tools stand in an environment of their own that sees the other one's packages.
override DOCS := .venv-docs
READY_DOCS := $(DOCS)/.ready

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-all lint clean

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
	@echo "make docs      the site, built into build/site, with warnings as errors"
	@echo "make clean     remove the environments, caches and build products; runs/ stays"
	@echo
	@echo "PYTHON=...     the Python (3.11 to 3.14) that creates the environment; default: the first of python3,"
	@echo "               python3.14, ..."
	@echo "PIP_FLAGS=...  extra flags for pip. PyPI's torch for Linux carries CUDA (gigabytes); for a CPU-only build:"
	@echo "               PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'"
	@echo "STOCK=1        what a user's pip takes from PyPI, whatever pip is configured to take on this machine; in an"
	@echo "               environment of its own, .venv-stock beside .venv"
	@echo "WORKERS=n      test processes (default 2)      ARGS=...  extra flags for pytest"

demo: $(READY)
	@$(BIN)/axes demo

test: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" --durations=40 --doctest-modules \
		axes tests $(ARGS)

test-all: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --hypothesis-profile=thorough \
		--doctest-modules axes tests $(ARGS)

docs: $(READY_DOCS)
	@PYTHONPATH=. NO_MKDOCS_2_WARNING=1 PYTHONWARNINGS=ignore::DeprecationWarning $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "the site is in build/site: python3 -m http.server -d build/site"

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/mypy axes

clean:
	rm -rf .venv .venv-stock .venv-docs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): requirements/dev.txt requirements/setup.sh requirements/stock_pip.py pyproject.toml
	@$(if $(AT_HOME),,rm -rf $(VENV))
	@sh requirements/setup.sh "$(VENV)" "$(STOCK)" "$(PYTHON)" $(PIP_FLAGS)
	@touch $(READY)

$(READY_DOCS): requirements/docs.txt $(READY)
	@$(BIN)/python -m venv --clear $(DOCS)
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> "$$($(DOCS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/axes-packages.pth"
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt $(PIP_FLAGS)
	@touch $(READY_DOCS)
