# Everything starts here: `make run` trains the sandbox, `make test` checks the code. Both do the set-up that they need,
# once; a second call reuses `.venv` as long as pyproject.toml and constraints.txt stay as they are.

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.shoal-installed

# One thread per process: many processes share the cores, and sums keep one order.
export OMP_NUM_THREADS ?= 1

# What Python has compiled it keeps: else each of some hundred processes that the tests start compiles all of it anew.
# At the set-up nothing is compiled: most of what is installed nobody imports, and it takes over a minute.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup run quick test test-all test-every test-configs floor portable house sim screenshots pages site lint style clean

help:
	@echo "make run       set up, then train the sandbox on a local swarm (a minute of training)"
	@echo "make quick     set up, then lint, the units' tests and a slice of the simulations: for the inner loop"
	@echo "make test      the same, types, more simulations, and most of what tells rules in several processes: before each commit"
	@echo "make test-all  the same, and of all that takes longer the third that this commit has: what .ci/run calls"
	@echo "make test-every  every test, with every check, which takes two hours on two cores: before a release"
	@echo "make test-configs  every file of configs/ trained in small (--tiny), which takes ten minutes"
	@echo "make floor     models of transformers with the oldest version of it that the extra hf allows; test-all contains it"
	@echo "make portable  tests of processes, transport and collectives without the calls of Linux; test-all contains it"
	@echo "make house     what a reader feels, in figures, beside those of other projects: read, not enforced"
	@echo "make sim       seeded fault schedules of the protocols' machines: make sim SEEDS=0:20000"
	@echo "make screenshots  pictures of the dashboard, in logs/screenshots; needs Debian's chromium"
	@echo "make pages     those pages of docs/ that are made from the code"
	@echo "make site      the documents as a site, in site/; its pages open from the disk"
	@echo "make lint      set up, then ruff, pyright, lint-imports and codespell"
	@echo "make setup     only the set-up, into $(VENV)"
	@echo "make clean     remove $(VENV) and the caches"

setup: $(STAMP)

INSTALL := $(PY) tools/install.py

# A shim that is named python3.12 but starts nothing is no Python: each candidate is asked for its version.
$(STAMP): pyproject.toml constraints.txt
	@set -euo pipefail; \
	python=""; \
	for name in python3.11 python3.12 python3; do \
	  if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python="$$name"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "shoal needs Python 3.11 or newer; found: $$(python3 --version 2>&1 || echo none)." >&2; \
	  echo "Install it (on Debian or Ubuntu: sudo apt-get install python3.11 python3.11-venv) and call make again." >&2; \
	  exit 2; \
	fi; \
	if ! [ -x $(PY) ] || ! $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  rm -rf $(VENV); \
	  "$$python" -m venv $(VENV) || { \
	    rm -rf $(VENV); \
	    echo "\`$$python -m venv\` failed; on Debian or Ubuntu: sudo apt-get install $$(basename $$python)-venv" >&2; exit 2; }; \
	fi
	@$(INSTALL) --constraint constraints.txt --editable '.[all,dev]'
	@touch $(STAMP)

run: setup
	$(PY) run_local.py
	@command -v shoal >/dev/null || echo "In this shell \`shoal\` is found after \`source $(VENV)/bin/activate\`."

lint: style
	$(VENV)/bin/pyright

style: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell

# Units compute: a worker for each core. Tests of real processes also wait, and meanwhile another worker computes.
CORES := $(shell getconf _NPROCESSORS_ONLN)
WORKERS ?= $(shell expr $(CORES) + 2)
PYTEST := $(PY) -m pytest --dist worksteal
TIER ?= all
SWARMS := tests/e2e

# Checks run beside the tests: those of types take a core for a minute. What they find is said after them, and counts.
# They take what the tests leave, in which whoever waits for a process that gets no time asks again and again.
# A line in which MAKE itself stands would be carried out by `make -n` too.
CHECKS := $(MAKE) --no-print-directory
define beside
	@$(1) >$(VENV)/beside.txt 2>&1 & checks=$$!; \
	trap 'kill $$checks 2>/dev/null' EXIT; \
	failed=0; $(2); \
	wait $$checks || failed=1; cat $(VENV)/beside.txt; $(3) exit $$failed
endef

quick: setup
	$(call beside,$(CHECKS) style,$(PYTEST) --tier=quick -n $(CORES) tests/unit tests/simulation || failed=1)

test: setup
	$(call beside,nice -n 19 $(CHECKS) lint,$(PYTEST) --tier=usual -n $(WORKERS) || failed=1)

# Of events and numbers that no test brings about some depend on time: where all tests run they are named, and fail nothing.
# Whole swarms use all cores, but not all the time, and most of it they wait: of all their runs three go on at once on two
# cores. What is left is taken by what runs beside the tests, with few workers and behind them in the queue.
FEWER := $(shell expr $(CORES) + 1)
# In a new environment each of eight processes that begin together would compile it all.
COMPILED_ONCE := from importlib import import_module; from tests.e2e.template import MODULES; [*map(import_module, MODULES)]
test-all: TIER = commit
test-all: export EMITTED_EVENTS := $(CURDIR)/$(VENV)/emitted
test-all: setup
	@rm -rf $(EMITTED_EVENTS)
	@$(PY) -c '$(COMPILED_ONCE)'
	$(call beside,nice -n 5 $(CHECKS) --keep-going CORES=1 WORKERS=2 TIER=$(TIER) lint floor portable,$(PYTEST) --tier=$(TIER) -n $(FEWER) --ignore=$(SWARMS) || failed=1; $(PYTEST) --tier=$(TIER) -n $(FEWER) $(SWARMS) || failed=1,$(if $(filter all,$(TIER)),$(PY) -m tests.emitted $(EMITTED_EVENTS) || true;))

test-every:
	@$(CHECKS) test-all TIER=all

# Of which test-every trains one for each task.
test-configs: setup
	$(PYTEST) -n 2 tests/e2e/test_configs.py --every-config

# Beside the newest version, which the environment has: what is cut, and how files name it, is transformers' own code.
FLOOR := $(VENV)/floor
$(FLOOR)/.installed: constraints-floor.txt $(STAMP)
	rm -rf $(FLOOR)
	$(INSTALL) --no-deps --target $(FLOOR) --requirement constraints-floor.txt
	touch $@

# What torch compiles is told by the newest version: it takes a quarter of the time.
floor: setup $(FLOOR)/.installed
	PYTHONPATH=$(FLOOR) $(PYTEST) --tier=$(TIER) -n $(CORES) tests/unit/model/hf tests/unit/checkpoint/test_hf_folder.py \
		tests/unit/inference/test_generation_hf.py --deselect \
		tests/unit/model/hf/test_routers.py::test_compiled_code_takes_the_weight_of_each_microbatch

# As on macOS; tests/e2e/test_portable.py has a whole swarm.
portable: setup
	SHOAL_PORTABLE=1 $(PYTEST) --tier=$(TIER) -n $(WORKERS) tests/unit/runtime tests/unit/transport tests/unit/collective \
		tests/unit/data/test_pool.py tests/unit/data/test_server_and_feed.py tests/integration/runtime

# Seeds A to B-1 of every simulated world, or with HEAD two hundred of this commit's own; see tests/simulation/README.md.
SEEDS ?= 0:1000
sim: setup
	PYTHONPATH=.:src $(PY) -m tests.simulation $(SEEDS)

screenshots: setup
	$(PY) benchmarks/dashboard.py --screenshots logs/screenshots

pages: setup
	$(PY) tools/pages.py

site: setup
	$(PY) tools/site.py
	$(VENV)/bin/zensical build --strict --clean

house: setup
	@$(PY) tools/house.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache .cache build site src/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
