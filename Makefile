# What people type. `make help` lists it; everything else is in scripts/ and in `mm`.
PYTHON ?= python3
BIN := .venv/bin
BEGAN := $(shell date +%s)
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev up down status test check lock format docs

help: ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## only the Python environment in .venv
	@command -v $(PYTHON) >/dev/null || { echo "mmadmin needs Python 3.11 or newer. Debian: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) scripts/setup.py

setup-dev: ## the same with what the tests need
	@command -v $(PYTHON) >/dev/null || { echo "mmadmin needs Python 3.11 or newer. Debian: apt-get install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) scripts/setup.py --dev

up: setup ## set up, start everything, deploy the demo model the first time
	@$(BIN)/mm up --since $(BEGAN)

down: ## end everything that `make up` started
	@$(BIN)/mm down

status: ## what runs, and where
	@$(BIN)/mm status

test: setup-dev ## every test, with the real engine (built once into MM_TEST_CACHE)
	@$(BIN)/python -m pytest $(ARGS)

check: setup-dev ## lint, format, types, walls between rooms, migrations, docs
	@scripts/check

format: setup-dev ## format code and templates
	@$(BIN)/ruff check --fix-only -q . && $(BIN)/ruff format . && $(BIN)/djangofmt templates

docs: setup-dev ## write the docs that are read out of the code
	@$(BIN)/python scripts/docs.py

lock: setup-dev ## resolve requirements/*.in anew into hashed *.txt
	@scripts/lock

bench-%: setup-dev ## measure: cli, gate, store, switch, kills, fit, panel, quantize, sandbox (docs/measurements.md)
	@$(BIN)/python -m bench.$* $(ARGS)
