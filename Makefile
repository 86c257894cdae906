# Two commands, each of which makes its own environment first:
#   make train    the preset `tiny` over two processes, experts spread between them, into runs/tiny
#   make test     the fast tests, two files at a time, in some 20 minutes on two cores
# The other tier; `.ci/run` runs both, and of both the files that a change can break:
#   make test-slow    the rest: faults, several hosts, whole runs, compiling for chips that are not here
# docs/map.md, a list of all files, each with its first line; it is not in the repository:
#   make map
# The browser that `.ci/run` tests the page of `tmoe serve` with; `make test` skips these tests without it:
#   make browser
# And one that installs nothing, for a machine with GPUs and no package index:
#   make test-gpu PYTHON=python3    tests that need a GPU, as many workers as fit; kernels compile meanwhile
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
# else each worker and each forked process compiles all files that it imports
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-slow test-gpu check browser map clean

train: .venv/ready
	$(BIN)/torchrun --nproc-per-node 2 train.py tiny --parallel.ep 2 --resume none

# counted.py ends what tests leave, also at a signal, and prints the CPU seconds of all processes
PYTEST := $(PYTHON) .ci/counted.py $(BIN)/pytest --numprocesses 2 --dist loadfile --max-worker-restart 0 --durations 10

test: .venv/ready
	$(PYTEST) -m 'not slow and not gpu'

test-slow: .venv/ready
	$(PYTEST) -m 'slow and not gpu'

test-gpu:
	$(PYTHON) tests/run_gpu.py

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/python .ci/prose.py

# Debian's headless Chromium for the tests of the page of `tmoe serve`; playwright, which drives it, is in .venv
BROWSER := chromium-headless-shell
ROOT := $(if $(filter 0,$(shell id -u)),,sudo)
browser:
	@command -v $(BROWSER) > /dev/null || { $(ROOT) apt-get update -qq && \
		$(ROOT) apt-get install --yes -qq --no-install-recommends $(BROWSER); }
	@$(BROWSER) --no-sandbox --version

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}; make PYTHON=..."'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

map:
	$(PYTHON) docs/make_map.py

clean:
	rm -rf .venv runs
