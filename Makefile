# Each target is one line to the real command; `make setup` is done where it is needed.
PYTHON ?= python3
MODEL  ?= smollm2-135m-instruct
PORT   ?= 8000
ARGS   ?=
BIN    := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(HOME)/.cargo/bin:$(PATH)

RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock pyproject.toml
FUZZ_SECONDS ?= 20

.PHONY: setup setup-dev serve test test-rust test-python lint bench fuzz loom stress equality soak format clean

setup: .venv/.built                ## venv, pinned dependencies, release build
setup-dev: .venv/.built .venv/.dev ## and what the tests need

.venv/.runtime: requirements/runtime.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -r $<
	touch $@

.venv/.dev: requirements/dev.txt | .venv/.runtime
	$(BIN)/pip install --disable-pip-version-check -r $<
	touch $@

.venv/.built: $(RUST_SOURCES) | .venv/.runtime
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

serve: setup                       ## MODEL=... PORT=... ARGS="..."
	$(BIN)/prefixcache serve --model $(MODEL) --port $(PORT) $(ARGS)

test: setup-dev lint test-rust test-python

test-rust:
	cargo test --workspace --quiet

test-python:
	$(BIN)/pytest --cov --cov-report=term:skip-covered --cov-fail-under=95

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m mypy.stubtest prefixcache._core

format:
	cargo fmt --all
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv target fuzz/target
