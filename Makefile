# Conveniences; README.md shows the plain commands behind them.
PYTHON ?= python3
ARGS ?=

.PHONY: run test check

run: .venv/ready  ## make run ARGS='strategy=ddp precision=bf16'
	.venv/bin/python -m dtf $(ARGS)

test: .venv/ready  ## make test ARGS='-m slow'
	.venv/bin/python -m pytest $(ARGS)

check: .venv/ready  ## lint, formats, types
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright --pythonpath .venv/bin/python

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --editable '.[dev]'
	touch $@
