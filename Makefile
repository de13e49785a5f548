# `make` alone lists the targets. Every target that needs .venv makes or completes it first (tools/setup: quick when current).

SHELL := /bin/bash
PYTHON := .venv/bin/python
.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench proto

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make or complete .venv with pinned packages; find or install Java 17
	@tools/setup

demo: setup ## the main job on this machine, with faults, and a verdict (SECONDS=30; ARGS="--keep" …)
	.venv/bin/seriatim demo $(if $(SECONDS),--seconds $(SECONDS)) $(ARGS)

test: setup ## all tests (ARGS="-k chain" …)
	$(PYTHON) -m pytest $(ARGS)

check: setup ## formatting, lint, types, import contracts, stubs up to date
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports
	tools/generate-stubs --check

bench: setup ## throughput, latency and outage of this machine, medians of 5 rounds (ARGS="--rounds 3 --json FILE")
	$(PYTHON) bench/run.py $(ARGS)

proto: setup ## make the gRPC stubs again from the .proto files
	tools/generate-stubs
