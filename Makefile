# Conveniences; README.md shows the plain commands behind them.
PYTHON ?= python3
ARGS ?=
FAST = --fast tests/unit tests/laws/test_same_numbers.py

.PHONY: run test test-fast test-oldest check gpu

run: .venv/ready  ## make run ARGS='strategy=ddp precision=bf16'
	.venv/bin/python -m dtf $(ARGS)

test: .venv/ready  ## make test ARGS='-m slow'
	.venv/bin/python -m pytest $(ARGS)

test-fast: .venv/ready  ## the quick unit tests, and the law of the same numbers on one and two ranks
	.venv/bin/python -m pytest $(FAST) $(ARGS)

test-oldest: .venv-oldest/ready  ## the fast tests on the oldest torch that is supported
	.venv-oldest/bin/python -m pytest $(FAST)

check: .venv/ready  ## lint, formats, types
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright --pythonpath .venv/bin/python

gpu:  ## prove the CUDA paths on one NVIDIA GPU and take the figures, ten minutes; installs nothing: docs/gpu.md
	$(PYTHON) -m bench.gpu $(ARGS)

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --editable '.[dev]'
	touch $@

.venv-oldest/ready: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet 'torch==2.11.*' 'torchvision==0.26.*' --editable '.[dev]'
	touch $@
