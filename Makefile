# Two commands, each of which makes its own environment first:
#   make train    the preset `tiny` over two processes, experts spread between them, into runs/tiny
#   make test     the tests, two files at a time
# And one that installs nothing, for a machine with GPUs and no package index:
#   make test-gpu PYTHON=python3    the tests that need a GPU, kernels compiled first, as many workers as fit
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: train test test-gpu check clean

train: .venv/ready
	$(BIN)/torchrun --nproc-per-node 2 train.py tiny --parallel.ep 2 --resume none

test: .venv/ready
	$(BIN)/pytest --numprocesses 2 --dist loadfile --max-worker-restart 0

test-gpu:
	$(PYTHON) tests/run_gpu.py

check: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}; make PYTHON=..."'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs
