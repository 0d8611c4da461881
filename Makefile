# Every target stands on its own in a fresh clone: it makes .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: test slow nightly lint format demo clean

test: .venv/dev.stamp  ## the fast tests, under 5 minutes
	$(PYTEST)

slow: .venv/dev.stamp  ## minutes long, one after the other
	$(BIN)/python -m pytest -m slow

nightly: .venv/dev.stamp  ## long histories, many seeds, and what measures time; before a release
	$(BIN)/python -m pytest -m nightly

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: .venv/demo.stamp  ## digits, voices and words, from data to a search, into demo/
	$(BIN)/mmcl demo --out demo --seed 0

clean:
	rm -rf .venv demo dist build .pytest_cache .hypothesis .mypy_cache .ruff_cache

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/dev.stamp .venv/demo.stamp: .venv/%.stamp: pyproject.toml | .venv/bin/python
	$(PIP) -e '.[$*]'
	touch $@
