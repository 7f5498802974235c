# Everything here needs Python 3.11 or newer with pip, and make. The first call installs into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
CLIENTS ?= 8
ROUNDS ?= 15
# Test files that run at the same time, and one core for each.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
FLOWER_NEXT := 1.42.0

.DEFAULT_GOAL := help
.PHONY: help install install-dev run deploy-demo test test-all test-flower-next lint bench clean distclean

help:
	@echo "make run       the quick start: FedTGP, $(CLIENTS) clients, 4 architectures, $(ROUNDS) rounds (CLIENTS=, ROUNDS=)"
	@echo "make deploy-demo   a SuperLink and three SuperNodes on this machine, with TLS and node keys; stops and cleans up"
	@echo "make test      the tests; make test-all with the slow ones"
	@echo "make lint      ruff and mypy; make test-flower-next runs a part of the tests on Flower $(FLOWER_NEXT)"
	@echo "make bench     the benchmarks, each with its own table"
	@echo "make clean     remove caches and builds; make distclean also .venv. Results in outputs/ stay"

# The stamps are younger than pyproject.toml as long as nothing has to be installed again.
install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(BIN)/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

run: install
	$(BIN)/protofed algorithm=fedtgp data=fashion_small partition=dirichlet partition.alpha=0.1 model=htcnn4 \
		train=steady federation.num_clients=$(CLIENTS) federation.rounds=$(ROUNDS)

# On free ports and in a temporary folder, so that nothing else that runs on this machine is touched.
deploy-demo: install
	$(BIN)/python -m tests.e2e.deploy_demo

test: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" $(PARALLEL)

test-all: install-dev
	$(BIN)/python -m pytest

# The code must also run on the newest Flower, whose nodes speak HTTP; its package shadows the installed one here.
test-flower-next: $(VENV)/.flower-next
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(VENV)/flower-next $(BIN)/python -m pytest $(PARALLEL) \
		tests/test_payload.py tests/server_app tests/test_federation.py tests/e2e/test_deployment.py \
		-k "payload or roster or two_rounds or plain_deployment or hospitals"

$(VENV)/.flower-next: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(VENV)/flower-next flwr==$(FLOWER_NEXT)
	@touch $@

lint: install-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

bench: install-dev
	@missed=0; for file in tests/benchmarks/bench_*.py; do \
		echo "== $$file"; $(BIN)/python -m tests.benchmarks.$$(basename "$$file" .py) || missed=1; done; exit $$missed

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
