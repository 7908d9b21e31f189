# `make quickstart` and `make test` are all the set-up a fresh machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test test-all lint mutants pictures clean

# The stamp is newer than pyproject.toml once everything it names is installed.
$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/installed-test: pyproject.toml $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

quickstart: $(VENV)/installed
	$(BIN)/rloo train +recipe=quickstart

test: $(VENV)/installed-test lint
	$(BIN)/python -m pytest -m 'not slow and not gpu'

test-all: $(VENV)/installed-test lint
	$(BIN)/python -m pytest -m 'not gpu'

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy rloo_cli

# Each guard is taken out once, and its test must fail: tests/mutants.yaml.
mutants: $(VENV)/installed-test
	$(BIN)/python tests/mutants.py

# The pictures of the README, from a run made now.
pictures: $(VENV)/installed
	rm -rf runs/quickstart
	$(BIN)/rloo train +recipe=quickstart
	$(BIN)/python -m rloo_cli.panel runs/quickstart docs/panel.svg --step 60
	cp runs/quickstart/curves.png docs/curves.png

clean:
	rm -rf $(VENV) runs dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
