# The two commands of the README, and the steps that they are made of.
#
#   make demo          everything set up and started, the main job done, then it stays up (ONCE=1: it exits)
#   make test          everything that CI runs
#   make soak          the long forms of what make test runs a tenth of: 100 policy edits under load, 10,000 callers that
#                      leave, 200,000 mixed requests, 20,000 calls, most of them bad, compared with what a Triton says
#
# ARGS are passed on: make demo ARGS="--http 127.0.0.1:9000"

SHELL := /bin/sh
VENV := build/venv
BIN := $(VENV)/bin

.PHONY: demo test lint unit integration soak redis nginx clean

demo: $(VENV)/.installed
	$(BIN)/python -m deploy.demo $(if $(ONCE),--once) $(ARGS)

test: lint unit integration

lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/.installed redis
	$(BIN)/python -m pytest tests/unit tests/property tests/contract

integration: $(VENV)/.installed redis nginx
	$(BIN)/python -m pytest tests/integration tests/e2e

# The long forms of what `integration` runs a tenth of.
soak: $(VENV)/.installed redis
	HEADRACE_SOAK=1 $(BIN)/python -m pytest -s tests/e2e/test_edits.py tests/e2e/test_cancels.py tests/e2e/test_soak.py
	HEADRACE_SOAK=1 $(BIN)/python -m pytest -s tests/integration/test_differential_fuzz.py

$(VENV)/.installed: pyproject.toml deploy/environment.sh
	sh deploy/environment.sh $(VENV)

nginx:
	sh deploy/environment.sh nginx

redis:
	sh deploy/environment.sh redis

clean:
	rm -rf build
