# Conveniences; README.md shows the plain commands behind them.
PYTHON ?= python3
ARGS ?=

.PHONY: run test test-fast check

run: .venv/ready  ## make run ARGS='strategy=ddp precision=bf16'
	.venv/bin/python -m dtf $(ARGS)

test: .venv/ready  ## make test ARGS='-m slow'
	.venv/bin/python -m pytest $(ARGS)

test-fast: .venv/ready  ## within a minute: unit tests, and the law of the same numbers on one and two ranks
	.venv/bin/python -m pytest --fast tests/unit tests/laws/test_same_numbers.py $(ARGS)

check: .venv/ready  ## lint, formats, types
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright --pythonpath .venv/bin/python

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --editable '.[dev]'
	touch $@
