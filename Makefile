# `make` alone lists the targets. Every target that needs .venv makes or completes it first (tools/setup: quick when current).

SHELL := /bin/bash
# Not PYTHON: that is the caller's word for what .venv is made with, and make would hand this one on to tools/setup.
RUN := .venv/bin/python
.DEFAULT_GOAL := help
.PHONY: help setup demo test soak check bench proto

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make or complete .venv (PYTHON=python3.12) with pinned packages; find or install Java 17
	@tools/setup

demo: setup ## the main job on this machine, with faults, and a verdict (SECONDS=30; ARGS="--keep" …)
	.venv/bin/seriatim demo $(if $(SECONDS),--seconds $(SECONDS)) $(ARGS)

test: setup ## all tests (ARGS="-k chain" …)
	@tools/setup --faults
	$(RUN) -m pytest -n 3 $(ARGS)

soak: setup ## FAULTS=500: on a real cluster, a report in REPORT (SEED=1); MINUTES=30: the simulator, new schedules for so long; EXHAUSTIVE=1; MUTANTS=300
	$(if $(FAULTS)$(MINUTES)$(EXHAUSTIVE)$(MUTANTS),,$(error say FAULTS=N, MINUTES=N, EXHAUSTIVE=1, MUTANTS=N, or several))
	$(if $(MINUTES),$(RUN) -m tests.simulation --minutes $(MINUTES))
	$(if $(EXHAUSTIVE),$(RUN) -m tests.simulation.exhaustive --each)
	$(if $(MUTANTS),$(RUN) -m tests.mutation --sample $(MUTANTS) $(if $(SEED),--seed $(SEED)))
	$(if $(FAULTS),@tools/setup --faults)
	$(if $(FAULTS),$(RUN) -m tests.faults.campaign --faults $(FAULTS) $(if $(SEED),--seed $(SEED)) --report $(or $(REPORT),fault-report))

check: setup ## formatting, lint, types, import contracts, stubs up to date
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	.venv/bin/lint-imports
	tools/generate-stubs --check

bench: setup ## Seriatim beside Kafka, NATS and a floor, in turn (ARGS="--only seriatim,kafka --cases throughput --rounds 5")
	$(RUN) -m bench $(ARGS)

proto: setup ## make the gRPC stubs again from the .proto files
	tools/generate-stubs
